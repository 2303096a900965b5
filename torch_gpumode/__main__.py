"""The command line: `python -m torch_gpumode {env,bench}`."""

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_gpumode")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "env", help="what is installed, how it was built, whether it works, and if not what to do"
    )
    bench_parser = commands.add_parser(
        "bench", help="measure it on this machine: bench collectives"
    )
    bench_parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()

    if arguments.command == "bench":
        from torch_gpumode import bench

        return bench.main(arguments.arguments)

    from torch_gpumode import env

    return env.main()


if __name__ == "__main__":
    sys.exit(main())
