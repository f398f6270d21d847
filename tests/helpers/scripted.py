"""The script that tests start as a user would: it becomes rank 0 and starts the others.

python tests/helpers/scripted.py '{"fault": "forward", ...}'
"""

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    rank = os.environ.get("LOCAL_RANK", "0")
    told = json.loads(sys.argv[1])
    folder = Path(told["folder"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    said = (folder / f"stderr{rank}").open("wb", buffering=0)
    os.dup2(said.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if told["fault"] == "import" and int(rank) == told["rank"]:
        (folder / "struck").write_text(str(time.monotonic()))
        if told["action"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    from tests.helpers.scenario import Scenario, run  # takes seconds, in a fresh process

    run(Scenario.from_json(sys.argv[1]))


if __name__ == "__main__":
    main()
