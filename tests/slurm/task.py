"""A task that appends what it is and which signals it gets to the file of its first argument, one JSON object a line,
until the file of its second argument exists."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

WATCHED = (signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    report, end = Path(sys.argv[1]), Path(sys.argv[2])

    def say(**facts: object) -> None:
        with report.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def tell(signum: int, frame: FrameType | None) -> None:
        say(signal=signal.Signals(signum).name)
        if signum == signal.SIGTERM:
            sys.exit()

    for signum in WATCHED:
        signal.signal(signum, tell)
    say(
        env={key: value for key, value in os.environ.items() if key.startswith(("SLURM", "CUDA"))},
        host=os.uname().nodename,
    )
    while not end.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
