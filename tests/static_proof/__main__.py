"""Everything that sentryward is asked, or what contains all words given: `make prove`. docs/static_proof.md says what the answers mean."""

import json
import os
import pathlib
import sys
import time

from . import proofs


def main():
    aot = pathlib.Path(os.environ.get("BUILD", "build"), "aot")
    facts = {kernel["name"]: kernel for kernel in json.loads((aot / "manifest.json").read_text())["kernels"]}
    questions = [question for question in proofs.questions() if all(word in str(question) for word in sys.argv[1:])]
    if not questions:
        sys.exit(f"no question contains all of: {' '.join(sys.argv[1:])}")
    failed, begin = [], time.monotonic()
    for i, question in enumerate(questions):
        print(f"[{i + 1}/{len(questions)}] {question}", end=" ", flush=True)
        name = question.kernel.name
        verdict, objections = question.ask((aot / f"{name}.ptx").read_text(), facts[name])
        print(f"-> {verdict}", flush=True)
        for objection in objections:
            print(f"    NOT AS IT SHOULD BE: {objection}", flush=True)
        failed += [question] if objections else []
    print(
        f"{len(questions) - len(failed)} of {len(questions)} answers are as they should be; {time.monotonic() - begin:.0f} s"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
