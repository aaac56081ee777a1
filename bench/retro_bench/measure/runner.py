"""Run one case in one type: check every contender, time those that passed side by side, and yield the records."""

import gc
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..check import numerics, oracle
from ..check.inputs import Inputs
from ..records import environment, record
from ..registry import CONTENDERS, OPERATORS, Case, Contender, resolved
from . import ceilings, choose, peak, samples, timing
from .pace import Pace
from .trial import KNOWN, Answers, Draws, Trial, WrongResult, drawn_like

LONG_CALL_S = 2.0  # a longer call is not repeated to observe its memory
CHECK = "check"  # the mode of a record that holds numerics alone
MOST_CEILINGS = 3  # repeated measurements of ceilings that kernels exceeded, per run
TIMED_SHARE = 1 / 64  # part of the oracle's budget for values that are only timed
QUICK_S = 0.2  # a yardstick that is called in less time is called with the second set of values too
DRAWS, DRAWS_S = 16, 5.0  # further values for which errors slightly above their limit are judged, and their seconds
OTHER_SEED = 2**30  # flipped in a seed, it draws the second set of values
Record = dict[str, Any]


@dataclass
class Run:
    """Fields that all records of one invocation share."""

    device: str
    timed: bool = True
    effort: timing.Effort = field(default_factory=timing.Effort)
    graphs: bool = False  # GPU: time the replay of a CUDA graph
    seed: int | None = None
    oracle_share: float = 1.0  # part of the oracle's usual budget
    begun: float = field(default_factory=lambda: time.monotonic())
    pace: Pace = field(default_factory=lambda: Pace([]))
    ceilings: dict[str, Any] | None = None
    ceilings_s: float = 0.0  # seconds that the last measurement of the ceilings took
    remeasured: int = 0  # how often the ceilings were measured again
    run: str = field(default_factory=record.new_run)
    git: dict[str, Any] = field(default_factory=environment.git_state)

    def measure_ceilings(self) -> None:
        """Measure the rates of the machine. Keep the higher of the old and the new rate, because other work on the
        machine can only lower a rate.
        """
        begun = time.monotonic()
        new = ceilings.measure(self.device)
        self.ceilings = ceilings.better(self.ceilings, new) if self.ceilings else new
        self.ceilings_s = time.monotonic() - begun


@dataclass
class Entry:
    """State of a contender in one case."""

    contender: Contender
    status: str = "ok"
    reason: str | None = None
    verdict: numerics.Verdict | None = None
    only: dict[str, Any] | None = None  # the time of a baseline whose forward pass was too slow to be repeated
    late: bool = False  # a baseline that the deadline left out: it has no record

    def fail(self, status: str, reason: str) -> None:
        self.status, self.reason = status, reason


def run_case(run: Run, case: Case, dtype: str, modes: list[str], contenders: list[Contender]) -> Iterator[Record]:
    """Yield the records of every contender and mode. One check covers all modes of a type.

    A contender and mode has up to three records of one id, of which the last counts: one after the check, one after
    the timing, and one with the ratios to the other contenders. An interrupted case thus keeps the results that exist.
    """
    seed = secrets.randbits(31) if run.seed is None else run.seed
    why = choose.unsupported_case(case, run.device)
    entries = [Entry(contender) for contender in contenders]
    answers: list[Answers] = []  # gets the answers of the case when they are solved
    failure = ("unsupported", why)
    shown = modes if run.timed else [CHECK]
    try:
        if not why:
            for entry in _check(run, case, dtype, seed, "fwdbwd" in modes, entries, answers):
                yield from (blank_record(run, case, dtype, mode, entry, seed) for mode in shown)
    except Exception as e:  # mostly out of memory
        failure = status_of(e)
    for entry in entries:
        if entry.status == "ok" and entry.verdict is None and not entry.late:  # it is never timed without a check
            entry.fail(*failure)
            yield from (blank_record(run, case, dtype, mode, entry, seed) for mode in shown)
    passed = [entry for entry in entries if entry.status == "ok" and not entry.late]
    for mode in modes if run.timed else ():
        if passed:
            yield from _timed(run, case, dtype, mode, answers[0], seed, passed)
    answers.clear()
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # otherwise dynamo stops compiling after several shapes
    if run.device == "cuda":
        torch.cuda.empty_cache()


def _check(
    run: Run,
    case: Case,
    dtype: str,
    seed: int,
    backward: bool,
    entries: list[Entry],
    answers: list[Answers],
) -> Iterator[Entry]:
    """Yield every entry with its verdict, or with the reason why it has none. Append the answers of the case to
    `answers`. A baseline that the deadline leaves out is marked and not yielded.
    """
    for entry in entries:
        if why := choose.unsupported(entry.contender, case, dtype, run.device, False):
            entry.fail("unsupported", why)
            yield entry
    able = [entry for entry in entries if entry.status == "ok"]
    if not able:
        return
    own = answers_of(run, case, dtype, seed, backward, drawn(run, case, dtype, seed))
    answers.append(own)
    for entry in sorted(able, key=lambda entry: entry.contender.name != choose.YARDSTICK):
        baseline, first = entry.contender.role == "baseline", entry.contender.name == choose.YARDSTICK
        if baseline and not run.pace.affords(dtype, first):
            entry.late = True
            continue
        begun = run.pace.spent
        measured = _judge(run, case, entry, own)
        if baseline:
            run.pace.count(dtype, run.pace.spent - begun, entry.only["minimum"] if entry.only else 0.0)
        if first and entry.status == "ok":
            own.yardstick = measured
        yield entry


def drawn(run: Run, case: Case, dtype: str, seed: int) -> Inputs:
    """Draw the two sets of values of a case."""
    arguments, other = (case.make(s, run.device, getattr(torch, dtype)) for s in (seed, seed ^ OTHER_SEED))
    return Inputs(OPERATORS[case.op], arguments, other, seed)


def answers_of(
    run: Run, case: Case, dtype: str, seed: int, backward: bool, inputs: Inputs, check: bool = True
) -> Answers:
    """Solve both sets of values of a case. With check=False solve only the values that are timed."""
    operator = OPERATORS[case.op]
    arguments, share = inputs.arguments, run.oracle_share
    backward = backward and bool(operator.floating(arguments))

    def solve(wanted: bool, share: float = share * TIMED_SHARE) -> oracle.Oracle:
        return oracle.solve(operator, case, arguments, seed, wanted, share, inputs.row)

    def more(contender: Contender, like: bool) -> tuple[Draws, Draws]:
        """Return the errors of a contender, and with `like` of the yardstick, for values of other seeds."""
        own, eager, begun = [], [], time.perf_counter()
        for other in range(seed + 1, seed + 1 + DRAWS):
            if own and time.perf_counter() - begun > DRAWS_S:
                break
            new = case.make(other, run.device, getattr(torch, dtype))
            truth = oracle.solve(operator, case, new, other, backward, share * TIMED_SHARE)
            for one, found in ((contender, own), (CONTENDERS[case.op, choose.YARDSTICK], eager))[: 1 + like]:
                found.append(numerics.errors(operator, one, new, truth))
        return own, eager

    own = Answers(operator, dtype, inputs, arguments, oracle.kinds(operator, arguments), solve, more=more)
    for number, covered in ((0, share), (KNOWN, share * TIMED_SHARE)):
        if check or number == KNOWN:
            inputs.write(number)
            own.add(number, solve(backward, covered))
    return own


def _judge(run: Run, case: Case, entry: Entry, answers: Answers) -> dict[str, numerics.Errors] | None:
    """Return the contender's errors. An exception becomes its status. A baseline's backward pass follows if its
    forward pass is fast enough. Kernels and the yardstick are called with a second set of values in the same memory.
    """
    contender, inputs, operator = entry.contender, answers.inputs, answers.operator
    costly = contender.role == "baseline" and run.device == "cpu"
    threads = torch.get_num_threads()

    def called(number: int, backward: bool) -> tuple:
        inputs.write(number)
        if contender.renew is not None:
            contender.renew()
        upstream = answers.upstream[number] if backward else None
        return numerics.called(operator, contender, answers.arguments, upstream, poison=number != KNOWN)

    def compared(number: int, outputs, grads, earlier) -> tuple[dict[str, numerics.Errors], numerics.Verdict]:
        if why := answers.fault(contender, list(outputs), list(earlier)) or inputs.overwritten():
            raise WrongResult(why)
        truth = answers.sealed[number].open()
        measured = answers.measured(outputs, grads, truth, few=number == KNOWN)
        return measured, answers.verdict(contender, measured, truth.checked)

    try:
        begun = time.perf_counter()
        found = called(0, backward=not costly)
        if costly and time.perf_counter() - begun >= run.effort.once_s:
            entry.only = _only(run, trial(contender, case, answers, False))
            inputs.write(0)
        if costly and not entry.only and answers.upstream[0] is not None and contender.differentiable:
            found = called(0, backward=True)
        quick = time.perf_counter() - begun < QUICK_S
        measured, entry.verdict = compared(0, *found)
        again = contender.role != "baseline" or (contender.name == choose.YARDSTICK and quick)
        if again and entry.verdict.passed:
            second = called(KNOWN, backward=found[1] is not None)
            more, verdict = compared(KNOWN, *second[:2], (*second[2], *found[0]))
            measured = numerics.worse(measured, more)
            if not verdict.passed:
                raise WrongResult(f"other values in the same memory: {verdict.complaint()}")
    except Exception as e:  # of any contender: the record has the message
        inputs.overwritten()
        entry.fail(*status_of(e))
        return None
    finally:
        timing.restore_threads(threads)
    if not entry.verdict.passed:
        entry.fail("numerics_fail", entry.verdict.complaint())
    return measured


def _only(run: Run, call) -> dict[str, Any] | None:
    """Return the time of a slow call, which is its only sample. None if the call is fast: its first call compiled."""
    took = timing.one(call, run.device, replace(run.effort, least=1, most=1))
    return took if took["minimum"] >= run.effort.once_s else None


def status_of(e: Exception) -> tuple[str, str]:
    """Return the status and the reason of a contender that raised an exception."""
    text = (str(e).strip() or "no message").splitlines()[0]
    if isinstance(e, WrongResult):
        return "numerics_fail", text
    if isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e):
        return "oom", text
    if isinstance(e, ValueError) and "cannot serve" in text:
        return "unsupported", text
    return "error", f"{type(e).__name__}: {text}"


def _timed(
    run: Run, case: Case, dtype: str, mode: str, answers: Answers, seed: int, entries: list[Entry]
) -> Iterator[Record]:
    """Time the contenders that passed, in alternation. Yield each record when its timing ends. At the end yield every
    record again, now with its ratios.
    """
    backward = mode == "fwdbwd"
    now = {entry.contender.name: replace(entry) for entry in entries}
    calls, times = {}, {}
    for name, entry in now.items():
        if backward and entry.only:
            slow = f"its forward pass takes {entry.only['minimum']:.2g} s"
            entry.fail("unsupported", f"{slow}, so that its backward pass is not run")
        elif why := choose.unsupported(entry.contender, case, dtype, run.device, backward):
            entry.fail("unsupported", why)
        elif entry.only:
            times[name] = entry.only
        else:
            calls[name] = trial(entry.contender, case, answers, backward)
        if entry.status != "ok":
            yield blank_record(run, case, dtype, mode, entry, seed)
    for name, outcome in timing.outcomes(calls, run.device, run.effort, run.graphs):
        if isinstance(outcome, Exception):
            now[name].fail(*status_of(outcome))
        else:
            times[name] = outcome
        yield blank_record(run, case, dtype, mode, now[name], seed) | {"time": times.get(name)}
    seconds = {name: samples.estimate(taken) for name, taken in times.items()}
    baselines = {name: s for name, s in seconds.items() if now[name].contender.role == "baseline"}
    for name, taken in times.items():
        done = blank_record(run, case, dtype, mode, now[name], seed) | {"time": taken}
        done["roofline"] = _roofline(run, case, dtype, mode, seconds[name])
        done["ceilings"] = run.ceilings
        done["speedup"] = {other: t / seconds[name] for other, t in baselines.items() if other != name} or None
        if name in calls and seconds[name] < LONG_CALL_S:
            threads = torch.get_num_threads()
            done["memory"], done["launches"] = peak.observe(calls[name], run.device)
            timing.restore_threads(threads)
        yield done


def trial(contender: Contender, case: Case, answers: Answers, backward: bool) -> Trial:
    """Return the timed call of a contender, whose inputs are rewritten and whose results are compared."""
    upstream = answers.upstream[KNOWN].clone() if backward else None
    return Trial(contender, answers, step(contender, case, answers.inputs.arguments, backward, upstream), upstream)


def step(
    contender: Contender,
    case: Case,
    arguments: dict[str, Any],
    backward: bool,
    upstream: torch.Tensor | None = None,
):
    """Return the timed call: a forward without autograd, or forward and backward to every floating input.

    It returns (outputs, gradients or None). upstream: of output 0; None: the first call draws it.
    """
    operator, function = OPERATORS[case.op], resolved(contender.function)
    if not backward:

        def forward():
            with torch.no_grad():
                return numerics.as_tuple(function(**arguments)), None

        return forward
    names = operator.floating(arguments)
    leaves = {name: arguments[name].detach().requires_grad_() for name in names}
    inputs = list(leaves.values())
    both = arguments | leaves

    def forward_and_backward():
        nonlocal upstream
        with torch.enable_grad():
            outputs = numerics.as_tuple(function(**both))
        if upstream is None:
            upstream = drawn_like(outputs[0])
        return outputs, torch.autograd.grad(outputs[0], inputs, upstream, allow_unused=True)

    return forward_and_backward


def _roofline(run: Run, case: Case, dtype: str, mode: str, seconds: float) -> dict[str, Any] | None:
    """Return the roofline of a time. Ceilings that it exceeds, because other work lowered them, are measured again."""
    work = _work(case, dtype, mode)
    share = ceilings.roofline(work, run.ceilings, dtype, seconds)
    while share and share["fraction"] > 1 and run.remeasured < MOST_CEILINGS:
        run.remeasured += 1
        run.measure_ceilings()
        share = ceilings.roofline(work, run.ceilings, dtype, seconds)
    return share


def _work(case: Case, dtype: str, mode: str):
    return OPERATORS[case.op].work(case, choose.ITEMSIZE[dtype], mode)


def blank_record(run: Run, case: Case, dtype: str, mode: str, entry: Entry, seed: int) -> Record:
    """Return a complete record without a measurement."""
    return record.blank(
        op=case.op,
        backend=entry.contender.name,
        role=entry.contender.role,
        case={"name": case.name, **case.content(), "source": case.source},
        dtype=dtype,
        mode=mode,
        seed=seed,
        status=entry.status,
        reason=entry.reason,
        numerics=asdict(entry.verdict) if entry.verdict else None,
        work=None if mode == CHECK else asdict(_work(case, dtype, mode)),
        run=run.run,
        git=run.git,
        environment=environment.environment(),
        device=environment.device(run.device),
        ceilings=run.ceilings,
    )
