"""The command line: `python -m torch_gpumode env`."""

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_gpumode")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "env", help="what is installed, how it was built, whether it works, and if not what to do"
    )
    parser.parse_args()

    from torch_gpumode import env

    return env.main()


if __name__ == "__main__":
    sys.exit(main())
