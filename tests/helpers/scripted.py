"""The script that tests start as a user would: it becomes rank 0 and starts the others.

python tests/helpers/scripted.py '{"fault": "forward", ...}'
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    from tests.helpers.scenario import Scenario, run

    rank = os.environ.get("LOCAL_RANK", "0")
    scenario = Scenario.from_json(sys.argv[1])
    folder = Path(scenario.folder)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    said = (folder / f"stderr{rank}").open("wb", buffering=0)
    os.dup2(said.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if scenario.fault == "import" and int(rank) == scenario.rank:
        scenario.strike()
    run(scenario)


if __name__ == "__main__":
    main()
