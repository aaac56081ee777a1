"""One process of `ab`: holds one tree's kernels and times one call when told to. JSON lines in, JSON lines out.

{"prepare": {kernel, backend, case, dtype, mode, plugins, seed, threads, check}} -> {"ok": true, "seconds": s} |
{"status": ..., "reason": ...} {"sample": repeats, "long": bool} -> {"seconds": s}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tree


def prepare(bench, wanted: dict):
    """The call to time, or a refusal."""
    import torch

    choose, runner = (importlib.import_module(f"{bench.__name__}.measure.{name}") for name in ("choose", "runner"))
    torch.set_num_threads(wanted["threads"])
    for module, folder in wanted["plugins"]:
        if folder not in sys.path:
            sys.path.append(folder)  # last: nothing there may stand in for the tree's own
        importlib.import_module(module)
    case, dtype = bench.CASES.get((wanted["kernel"], wanted["case"])), wanted["dtype"]
    contender = bench.CONTENDERS.get((wanted["kernel"], wanted["backend"]))
    if case is None or contender is None:
        return None, {
            "status": "error",
            "reason": "registered in one process only: name the module that registers it with --plugin",
        }
    if why := choose.unsupported_case(case, "cpu") or choose.unsupported(
        contender, case, dtype, "cpu", wanted["mode"] == "fwdbwd"
    ):
        return None, {"status": "unsupported", "reason": why}
    if wanted["check"]:
        eager = bench.CONTENDERS[(wanted["kernel"], choose.YARDSTICK)]
        run = runner.Run("cpu", timed=False, seed=wanted["seed"])
        record = list(runner.run_case(run, case, dtype, [wanted["mode"]], [eager, contender]))[-1]
        if record["status"] != "ok":
            return None, {"status": record["status"], "reason": record["reason"]}
    arguments = case.make(wanted["seed"], "cpu", getattr(torch, dtype))
    call = runner.step(contender, case, arguments, wanted["mode"] == "fwdbwd", wanted["seed"])
    try:
        call()
        begun = time.perf_counter()
        call()
    except Exception as e:  # the coordinator decides what a refusal means
        return None, {"status": "error", "reason": f"{type(e).__name__}: {e}"}
    return call, {"ok": True, "seconds": time.perf_counter() - begun}


def sample(call, repeats: int, long: bool) -> float:
    if not long:
        call()  # its caches were the other process's a moment ago
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begun) / repeats


def main() -> None:
    # stdout is the protocol: whatever a library prints goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = tree.load(Path(sys.argv[1]))
    call = None
    for line in sys.stdin:
        message = json.loads(line)
        if "prepare" in message:
            call, answer = prepare(bench, message["prepare"])
        else:
            answer = {"seconds": sample(call, message["sample"], message["long"])}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
