"""One process of `ab`: holds one tree's kernels and times one call when told to. JSON lines in, JSON lines out.

{"prepare": {op, backend, case, dtype, mode, plugins, seed, threads, check}} -> {"ok": true, "seconds": s,
"case": {name: text}} | {"status": ..., "reason": ...}
{"sample": repeats, "long": bool} -> {"seconds": s} | {"status": ..., "reason": ...}
{"finish": true} -> {"ok": true} | {"status": ..., "reason": ...}
{"list": fields of a Selection, "plugins": [[module, folder], ...]} -> {"items": [[op, backend, case, dtype, mode]]}
"""

import importlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tree as trees


class Side:
    """The harness with one tree's code; plug-ins are imported when an item first names them."""

    def __init__(self, tree: Path, root: Path):
        self.tree, self.root, self.harness = tree, root, None

    def load(self, plugins: list[list[str]]) -> dict | None:
        """Import the harness and the plug-ins; returns a refusal where one can't be imported."""
        folders = tuple(folder for _, folder in plugins)
        if self.harness is None:
            self.harness = trees.load(self.tree, self.root, folders)
        for folder in folders:
            if (place := str(self.tree / folder)) not in sys.path:
                sys.path.append(place)
        for name, _ in plugins:
            try:
                with self.module("registry").plugin(name):
                    trees.plug_in(name, self.tree, self.root)
            except ModuleNotFoundError as e:
                if not f"{name}.".startswith(f"{e.name}."):
                    return {"status": "error", "reason": f"--plugin {name}: {e}"}
                return {"status": "unsupported", "reason": f"no plug-in {name} in this tree"}
            except (Exception, SystemExit) as e:
                return {"status": "error", "reason": f"--plugin {name}: {type(e).__name__}: {e}"}
        return None

    def module(self, name: str):
        return importlib.import_module(f"{self.harness.__name__}.{name}")


def listed(side: Side, message: dict) -> dict:
    """List the items that this tree would measure: none without its plug-ins; if no op is named, theirs."""
    if side.load(message["plugins"]):
        return {"items": []}
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in message["list"].items()}
    choose, known = side.module("measure.choose"), side.harness.OPERATORS
    named = fields["ops"] or side.module("registry").of_plugins(name for name, _ in message["plugins"])
    # the other tree may have more
    fields["ops"] = tuple(name for name in named if any(choose.matches(op, (name,)) for op in known))
    try:
        items = side.module("compare.ab").items(choose.Selection(**fields))
    except choose.EmptySelection:
        items = []
    return {"items": [[i.op, i.backend, i.case, i.dtype, i.mode] for i in items]}


def prepare(side: Side, wanted: dict):
    """The call to time, or None, and the answer."""
    import torch

    if refusal := side.load(wanted["plugins"]):
        return None, refusal
    harness, choose, runner = side.harness, side.module("measure.choose"), side.module("measure.runner")
    torch.set_num_threads(wanted["threads"])
    case, dtype = harness.CASES.get((wanted["op"], wanted["case"])), wanted["dtype"]
    contender = harness.CONTENDERS.get((wanted["op"], wanted["backend"]))
    if case is None or contender is None:
        if wanted["plugins"]:
            return None, {"status": "unsupported", "reason": "no plug-in of this tree registers it"}
        why = "registered in one process only: name the module that registers it with --plugin"
        return None, {"status": "error", "reason": why}
    backward, seed = wanted["mode"] == "fwdbwd", wanted["seed"]
    if why := choose.unsupported_case(case, "cpu") or choose.unsupported(contender, case, dtype, "cpu", backward):
        return None, {"status": "unsupported", "reason": why}
    run = runner.Run("cpu", timed=False, seed=seed)
    if wanted["check"]:
        eager = harness.CONTENDERS.get((wanted["op"], choose.YARDSTICK))
        record = list(runner.run_case(run, case, dtype, [wanted["mode"]], [c for c in (eager, contender) if c]))[-1]
        if record["status"] != "ok":
            return None, {"status": record["status"], "reason": record["reason"]}
    inputs = runner.drawn(run, case, dtype, seed)
    answers = runner.answers_of(run, case, dtype, seed, backward, inputs, check=False)
    call = runner.trial(contender, case, answers, backward)
    call.first()
    seconds = side.module("measure.timing").rewritten(call, 1)
    content = side.module("records.record").described({**case.shape, **case.options, **inputs.arguments})
    return call, {"ok": True, "seconds": seconds, "case": content}


def main() -> None:
    # stdout is the protocol: whatever a library prints goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side, call = Side(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()), None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "prepare" in message:
                call, answer = prepare(side, message["prepare"])
            elif "list" in message:
                answer = listed(side, message)
            elif "finish" in message:
                call.finish()  # compares one more call, on values that no call has had
                answer = {"ok": True}
            else:
                if not message["long"]:
                    call()  # the other process has just filled the caches
                answer = {"seconds": side.module("measure.timing").rewritten(call, message["sample"])}
        except Exception as e:  # The coordinator reads the status of a failed kernel or check.
            status, reason = side.module("measure.runner").status_of(e)
            answer = {"status": status, "reason": reason}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
