"""Runs sentryward on a launch and reads its answer."""

import dataclasses
import json
import pathlib
import resource
import tempfile

import sentryward

from . import launch

# What is wrong with a kernel, by the result or, where that says only that sentryward got stuck, by what it got stuck on.
SYNCHRONISATION, RACE, LIFETIME = "synchronisation", "race", "lifetime"
FINDINGS = {
    "not_wellsynced": SYNCHRONISATION,
    "shared_control_blocked": SYNCHRONISATION,  # every thread waits
    "potential_race": RACE,
    "invalid_lifecycle": LIFETIME,
    "tmem_missing_dealloc": LIFETIME,
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    result: str
    codes: tuple[str, ...]  # what was found or stood in the way
    lines: tuple[str, ...]  # of the PTX, that take part in it
    seconds: float  # of one core
    report: dict = dataclasses.field(repr=False)

    @property
    def finding(self):
        """What is wrong, None where sentryward found nothing or could not follow the kernel."""
        return next((FINDINGS[said] for said in (self.result, *self.codes) if said in FINDINGS), None)

    def __str__(self):
        because = f" ({', '.join(self.codes)})" if self.codes else ""
        return f"{self.result}{because}, {self.seconds:.0f} s of a core"


def verify(ptx, facts, problem, timeout_seconds=3600):
    """The verdict on a kernel's PTX as launched for a problem."""
    text, begin = launch.readable(ptx), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        kernel, description = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "launch.json")
        kernel.write_text(text)
        description.write_text(json.dumps(launch.describe(facts, problem)))
        report = sentryward.verify(kernel, input=description, timeout_seconds=timeout_seconds)
    codes = dict.fromkeys(found["code"] for found in report["diagnostics"])
    named = dict.fromkeys(event["line"] for event in report.get("source_events", []))
    lines = text.splitlines()
    return Verdict(
        report["result"],
        tuple(codes),
        tuple(lines[number - 1].strip() for number in named),
        _cpu_seconds() - begin,
        report,
    )


def _cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def objections(verdict, facts, problem):
    """Why a verdict is not the proof meant; empty where it is.

    "race_free" alone would also be said of a kernel that does nothing, or with conditions; here it is said of all the work, and under one assumption only.
    """
    report = verdict.report
    if verdict.result != "race_free":
        return [str(verdict)]
    wrong = []

    def check(what, found, wanted):
        if found != wanted:
            wrong.append(f"{what}: {found}, not {wanted}")

    passed = {"synchronization": "passed", "memory": "passed", "equivalence": "not_requested"}
    check("checks", report["checks"], passed)
    for part in ("memory_analysis_complete", "search_complete"):
        check(part, report[part], True)
    for part in ("race_count", "unresolved_count", "warning_count"):
        check(part, report[part], 0)
    # Which lane `elect.sync` chooses: the first one.
    used = [assumption["key"] for assumption in report["assumptions"] if assumption["triggered"]]
    check("assumptions used", used, ["representative_election"])
    frontend = report["frontend"]
    for condition in ("data_branch_decisions", "opaque_compute_regions"):
        check(condition, frontend["frontend_assumptions"][condition], [])
    check("branches decided for it", frontend["user_branch_decisions"], [])
    check("trusted addresses", report["address_model"]["address_invariants"], [])
    check(
        "threads",
        frontend["thread_count"],
        problem.clusters * facts["threads"] * facts["cluster"][0] * facts["cluster"][1],
    )
    for start, wanted in launch.work(facts, problem).items():
        executed = sum(count for opcode, count in frontend["reached_opcodes"].items() if opcode.startswith(start))
        check(f"{start} executed", executed, wanted)
    return wrong
