import pytest

from tests.helpers.distributed import DEADLINE_S, run_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked ``world_size(n, deadline_s=30)`` once per rank, each a process."""
    marker = pyfuncitem.get_closest_marker("world_size")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run_ranks(
        pyfuncitem.obj,
        marker.args[0],
        {name: pyfuncitem.funcargs[name] for name in names},
        deadline_s=marker.kwargs.get("deadline_s", DEADLINE_S),
    )
    return True
