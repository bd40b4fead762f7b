"""Paths through the PTX of a kernel: which instruction may come after which."""

import itertools
import re

JUMPS = ("bra", "bra.uni")
ENDS = ("ret", "exit", "trap")


class Flow:
    """instructions: those of the body, without predicates. after[i]: indices of those that may follow instruction i; none after the last of a thread."""

    def __init__(self, ptx):
        self.instructions, self.after = [], []
        body = re.sub(r"//.*", "", ptx[re.search(r"^\{", ptx, re.MULTILINE).end() :])
        # Labels of inline assembly are its block's: the same ones are in every block.
        labels, jumps, scope, blocks = {}, [], (), itertools.count()
        for line in map(str.strip, body.splitlines()):
            if line == "{":
                scope = (*scope, next(blocks))
            elif line == "}":
                scope = scope[:-1]
            elif label := re.fullmatch(r"([\w$]+):", line):
                labels[scope, label[1]] = len(self.instructions)
            elif line and not line.startswith("."):
                guard, text = re.fullmatch(r"(@!?\S+\s+)?([^;]*\S)\s*;", line).groups()
                opcode, _, operands = " ".join(text.split()).partition(" ")
                if opcode in JUMPS:
                    jumps.append((len(self.instructions), scope, operands))
                goes_on = guard or opcode not in JUMPS + ENDS
                self.instructions.append(f"{opcode} {operands}".strip())
                self.after.append([len(self.instructions)] if goes_on else [])
        for at, scope, label in jumps:
            within = next(scope[:depth] for depth in range(len(scope), -1, -1) if (scope[:depth], label) in labels)
            self.after[at].append(labels[within, label])

    def find(self, pattern):
        return [i for i, text in enumerate(self.instructions) if re.match(pattern, text)]

    def reached(self, start, stop=r"(?!)"):
        """Indices of the instructions on every path from `start` on, each path up to its first that matches `stop`."""
        seen, todo = set(), list(self.after[start])
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo += [] if re.match(stop, self.instructions[at]) else self.after[at]
        return seen
