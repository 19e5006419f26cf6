"""The measuring process: it starts the systems, takes turns, keeps to the limits, and never loses a case silently."""

from __future__ import annotations

import datetime
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_weir.bench.cases import CAPTURES, CASES, STEERS, can_run
from vllm_weir.bench.plan import BenchPlan, BenchTask, EngineChoice
from vllm_weir.bench.process import Deadlines, TaskTimes, WorkerExited, WorkerProcess, WorkerTimeout
from vllm_weir.bench.result import UNCOMPARED, BenchResult, RowCheck, mark_checks, set_ratios, startup
from vllm_weir.bench.systems import known_systems

RESTARTS = 4


@dataclass(frozen=True)
class Group:
    """Systems whose engines live at the same time, on one kind of engine, and what is timed on them."""

    names: tuple[str, ...]
    choice: EngineChoice
    tasks: tuple[BenchTask, ...]

    @property
    def in_turns(self) -> bool:
        return len(self.names) > 1


class Bench:
    """One run of a plan."""

    def __init__(self, plan: BenchPlan, out: Path, workdir: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.out = out
        self.workdir = workdir
        self.say = say
        self.workers: dict[str, WorkerProcess] = {}
        self.restarts: dict[str, int] = {}
        self.start_seconds: dict[str, list[float]] = {}
        self.unavailable: dict[str, str] = {}
        self.all_times: list[TaskTimes] = []
        self.samples: list[tuple[str, Path]] = []
        self.steer_checks: dict[tuple[str, str], dict[str, Any]] = {}
        self.row_checks: list[RowCheck] = []
        self.called: set[tuple[str, str]] = set()
        """(system, case) of steps, or (system, case and size) of workloads, that were called already."""
        self.choice = EngineChoice()
        self.deadlines = Deadlines.starting_now(plan)
        settings = plan.model_dump(mode="json", exclude={"model", "lens_path", "rivals_path"})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.result = BenchResult(device="", vllm="", torch="", model=plan.model_name, runs=[{"date": now, **settings}])

    def run(self) -> BenchResult:
        """Run all groups one after the other; the result is on disk after each."""
        started = time.monotonic()
        self.deadlines = Deadlines.starting_now(self.plan)
        groups = self.groups()
        for name in self.plan.systems:
            if not any(name in group.names for group in groups):
                self.leave_out(name, "skipped", "; ".join(dict.fromkeys(self.plan.cannot(name).values())))
        try:
            for group in groups:
                self.run_group(group)
        finally:
            for worker in self.workers.values():
                worker.close()
        if self.samples:
            self.say("comparing the rows with transformers")
            from vllm_weir.bench.reference import compare

            self.row_checks = compare(self.plan, self.samples, self.workdir)
        self.result.runs[0]["seconds"] = round(time.monotonic() - started, 1)
        self.write()
        return self.result

    def groups(self) -> list[Group]:
        """Return what runs together: engines for steps first, then those for workloads."""
        out = []
        if self.plan.has_steps:
            tasks = {name: self.plan.tasks(name) for name in self.plan.systems}
            # A system with none of these cases starts where its start is timed.
            timed = "startup" in self.plan.cases
            kept = {n: ts for n, ts in tasks.items() if ts or (timed and can_run(n, "startup"))}
            out += self._together(kept, EngineChoice())
        if self.plan.named_workloads:
            choices: dict[EngineChoice, dict[str, list[BenchTask]]] = {}
            for name in self.plan.systems:
                for task in self.plan.workload_tasks(name):
                    choice = known_systems()[name].engine_choice(self.plan, task.case)
                    choices.setdefault(choice, {}).setdefault(name, []).append(task)
            for choice, of_systems in choices.items():
                out += self._together(of_systems, choice)
        return out

    def _together(self, tasks: dict[str, list[BenchTask]], choice: EngineChoice) -> list[Group]:
        """Return groups: stock and Weir take turns, unless they should not, and the others follow alone."""
        pair = tuple(name for name in tasks if name in ("stock", "weir"))
        if not self.plan.interleave or len(pair) < 2:
            pair = ()
        sets = [pair, *((name,) for name in tasks if name not in pair)]
        return [Group(names, choice, tuple(t for n in names for t in tasks[n])) for names in sets if names]

    def run_group(self, group: Group) -> None:
        """Start a group's engines, take turns, check what they deliver, and end them."""
        self.choice = group.choice
        steps = group.choice.kind == "steps"
        starts = self.plan.startups if steps else 1
        for i in range(starts):
            for name in group.names:
                if name not in self.unavailable:
                    self.open(name, timed=steps or not self.plan.has_steps)
            if i < starts - 1:
                self.stop(group.names)
        group_times = [TaskTimes(task) for task in group.tasks if task.system in self.workers]
        self.all_times += group_times
        self.called -= {call for call in self.called if call[0] in group.names}  # new engines
        steered = sorted({(t.task.system, t.task.case) for t in group_times if t.task.case in STEERS})
        if steps:
            for system, case in steered:
                self.check_steering(system, case)  # first: what is timed later may end the engine
        for size in dict.fromkeys(t.task.size for t in group_times) if group.in_turns or not steps else ():
            self.take_turns([t for t in group_times if t.task.size == size])
        if steps and not group.in_turns:
            for times in group_times:
                self.take_turns([times])
        if not steps:
            for system, case in steered:
                self.check_steering(system, case)  # last: the first call of the case is timed
        self.stop(group.names)
        self.write()

    def open(self, name: str, timed: bool) -> bool:
        """Start a system's engine; return False, with the reason in the result, if it cannot start."""
        if self.deadlines.left_of_run() <= 0:
            self.leave_out(name, "skipped", f"not started: the limit is {self.plan.run_seconds:.0f} s a run")
            return False
        self.say(f"{name}: starting")
        worker = self.workers[name] = WorkerProcess(name, self.plan, self.workdir)
        try:
            hello = worker.ask(120, "hello")
            if hello.get("missing"):
                self.leave_out(name, "skipped", hello["missing"])
                return False
            ready = worker.ask(self.plan.start_seconds, "start", choice=self.choice.model_dump())
            for reply in (hello, ready, worker.ask(120, "fill") if "error" not in ready else {}):
                if "error" in reply:
                    self.leave_out(name, "failed", f"{reply['error']} | {worker.last_words()}")
                    return False
        except (WorkerTimeout, WorkerExited) as e:
            self.leave_out(name, "failed", f"did not start: {e}")
            return False
        if timed:
            self.start_seconds.setdefault(name, []).append(ready["seconds"])
        about = ready["about"]
        self.result.device, self.result.vllm, self.result.torch = about["device"], about["vllm"], about["torch"]
        arguments = {k: v for k, v in ready["arguments"].items() if k not in ("model", "hf_model_id")}
        self.result.systems[name] = {"status": "measured", "version": hello["version"], "engine": arguments}
        if cannot := self.plan.cannot(name) if name != "stock" else {}:
            self.result.systems[name]["cannot"] = cannot
        self.say(f"{name}: ready after {ready['seconds']:.1f} s")
        return True

    def leave_out(self, name: str, status: str, reason: str) -> None:
        """Write down why a system cannot be measured, and end its process."""
        self.say(f"{name}: {status}: {reason}")
        self.unavailable[name] = reason
        if self.result.systems.get(name, {}).get("status") != "measured":
            self.result.systems[name] = {"status": status, "reason": reason}
        else:  # what it measured stands
            self.result.systems[name]["reason"] = reason
        if name in self.workers:
            self.workers.pop(name).close(5)

    def stop(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.workers:
                self.workers.pop(name).close()

    def take_turns(self, turns: Sequence[TaskTimes]) -> None:
        """Warm up each task, then repeat one after the other, so that a drift of the machine meets all alike."""
        for times in turns:
            self.skip_if_hopeless(times)
            for _ in range(self.plan.warmups):
                self.once(times, times.warm)
        for done in range(10 * self.plan.repeats):
            shortest = min((sum(times.timed) for times in turns if not times.closed), default=math.inf)
            if done >= self.plan.repeats and shortest >= self.plan.least_seconds:
                break
            for times in turns:
                self.once(times, times.timed)
        for times in turns:
            shown = times.result()
            figure = "-" if shown.median is None else f"{shown.median:.2f}"
            unit = "ktok/s" if times.task.size.kind == "prefill" else "ms"
            note = f" ({shown.note})" if shown.note else ""
            self.say(f"{times.task.system}: {times.task.case}, {times.task.size.label}: {figure} {unit}{note}")
        self.write()

    def skip_if_hopeless(self, times: TaskTimes) -> None:
        """Close a task whose case ran out of time with a smaller batch."""
        task = times.task
        for earlier in self.all_times:
            smaller = earlier.task
            same = (smaller.system, smaller.case, smaller.size.kind) == (task.system, task.case, task.size.kind)
            if same and earlier.late and not earlier.timed and smaller.size.count < task.size.count:
                times.close(f"not tried: {smaller.size.label} {earlier.note}", late=True)
                return

    def once(self, times: TaskTimes, into: list[float]) -> None:
        """Run a task once, unless there is no time for it."""
        if times.closed:
            return
        runs = times.warm + times.timed
        left = self.deadlines.left(times)
        if left <= min(runs, default=0):
            one = f"one run took {runs[-1]:.1f} s" if runs else "not begun"
            self.deadlines.end(times, f"stopped after {len(times.timed)} repeats" if times.timed else one)
            return
        task = times.task
        worker = self.workers.get(task.system) or self.restart(task.system)
        if worker is None:
            times.close("not run: its engine ended before and did not come back")
            return
        left = self.deadlines.left(times)  # a new engine took its time
        keep = None
        if task.case in CAPTURES and into is times.timed and not into:
            keep = str(self.workdir / f"rows-{len(self.samples)}.safetensors")
        is_first = self._is_first_call(task)
        try:
            reply = worker.ask(left, "run", case=task.case, size=task.size.model_dump(), keep=keep)
        except WorkerTimeout:
            times.lost = left
            logged = worker.last_error()
            self.drop(task.system)
            self.deadlines.end(times, "did not finish", f"; logged: {logged}" if logged else "")
        except WorkerExited as e:
            self.drop(task.system)
            times.close(f"failed: {e}")
        else:
            if "error" in reply:
                times.close(f"failed: {reply['error']}")
                return
            into.append(reply["seconds"])
            if is_first:
                times.first = reply["seconds"]
            if into is times.timed:
                times.graphs += reply.get("graphs", 0)
            if keep:
                self.samples.append((task.system, Path(keep)))

    def _is_first_call(self, task: BenchTask) -> bool:
        """Return whether an engine has not run this case before, or this workload at this size."""
        call = (task.system, f"{task.case} {task.size.label}" if task.size.is_workload else task.case)
        first = call not in self.called
        self.called.add(call)
        return first

    def drop(self, name: str) -> None:
        self.workers.pop(name).close(0.1)

    def restart(self, name: str) -> WorkerProcess | None:
        """Start a new engine for a system whose last one ended, if there is time for its start."""
        if self.start_seconds.get(name, [0])[-1] > self.deadlines.left_of_run():
            return None
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if self.restarts[name] > RESTARTS or name in self.unavailable:
            return None
        about = self.result.systems.get(name)
        if self.open(name, timed=False):
            return self.workers[name]
        if about is not None:
            self.result.systems[name] = about  # what it measured before stands
        return None

    def check_steering(self, name: str, case: str) -> None:
        """Compare rows after an intervention with what it should make of the rows before it, if the system has them."""
        if not known_systems()[name].compares_steering:
            return
        worker = self.workers.get(name) or self.restart(name)
        left = min(self.plan.case_seconds, self.deadlines.left_of_run())
        if worker is None or left <= 0:
            return
        try:
            self.steer_checks[name, case] = worker.ask(left, "steer_check", case=case)
        except (WorkerTimeout, WorkerExited) as e:
            self.say(f"{name}: {case} was not compared: {e}")
            self.drop(name)

    def write(self) -> None:
        """Write the result so far."""
        cases = [times.result() for times in self.all_times]
        if "startup" in self.plan.cases:
            cases += [startup(name, seconds) for name, seconds in self.start_seconds.items()]
        self.result.cases = sorted(cases, key=lambda c: (CASES.index(c.case), c.label != "start"))
        self.result.checks = [
            steering_check(times.task, reply, self.plan.dtype)
            for times in self.all_times
            if times.timed and (reply := self.steer_checks.get((times.task.system, times.task.case)))
        ] + self.row_checks
        note_uncompared(self.result)
        set_ratios(self.result.cases)
        mark_checks(self.result)
        self.result.save(self.out)


def steering_check(task: BenchTask, reply: dict[str, Any], dtype: str) -> RowCheck:
    """Return a worker's answer about steering as a check of one task."""
    done = "before without the direction" if task.case == "ablate_everywhere" else "before + vector"
    what = reply.get("error") or f"after = {done}, {reply['rows']} rows of {reply['layers']} blocks"
    value = min(reply.get("worst", 1e9), 1e9)
    # One rounding of the sum; two passes differ by what all blocks before have rounded.
    # Two bfloat16 passes of a deep model differ by several percent: what is not steered at all differs by more.
    bound = 1e-5 if dtype == "float32" else 2**-7 if reply.get("one_pass") else 2**-3
    return RowCheck(
        system=task.system,
        case=task.case,
        size=task.size.label,
        what=what,
        value=value if value == value else 1e9,
        bound=bound,
        rows=reply.get("rows", 0),
        passed=value <= bound and reply["cosine"] > 0.9,
        detail={k: reply[k] for k in ("cosine",) if k in reply},
    )


def note_uncompared(result: BenchResult) -> None:
    """Add a note to every case whose rows should have been compared, and were not."""
    compared = {(c.system, c.case, c.size) for c in result.checks}
    for case in result.cases:
        owed = case.case in (*CAPTURES, *STEERS) and case.median is not None
        if owed and (case.system, case.case, case.label) not in compared:
            case.note = "; ".join(filter(None, [case.note, UNCOMPARED]))


def run_plan(plan: BenchPlan, out: Path, workdir: Path, say: Callable[[str], None]) -> BenchResult:
    """Run a plan; the processes' logs stay beside the result if something went wrong."""
    bench = Bench(plan, out, workdir, say)
    try:
        return bench.run()
    finally:
        logs = out.with_suffix(".logs")
        wrong = not bench.result.passed or any(s["status"] == "failed" for s in bench.result.systems.values())
        if wrong or any(c.note for c in bench.result.cases):
            logs.mkdir(parents=True, exist_ok=True)
            for log in workdir.glob("*/log.txt"):
                shutil.copy(log, logs / f"{log.parent.name}.txt")
