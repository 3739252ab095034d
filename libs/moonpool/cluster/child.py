"""The first code of every child: bind its life to its parent's, choose its cores, become the program.

    python -m moonpool.cluster.child --parent PID [--cores 0,1] -- PROGRAM [ARGUMENT ...]

Runs in the child instead of a preexec hook of the parent, because a hook runs between fork and exec,
where a parent with threads (gRPC has some) may deadlock. The death signal survives exec.
"""

from __future__ import annotations

import argparse
import os

from moonpool.service.parent import die_with_parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="moonpool.cluster.child")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    program: list[str] = arguments.program
    if program[:1] == ["--"]:
        program = program[1:]
    die_with_parent(arguments.parent)
    if arguments.cores:
        os.sched_setaffinity(0, {int(core) for core in arguments.cores.split(",")})
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
