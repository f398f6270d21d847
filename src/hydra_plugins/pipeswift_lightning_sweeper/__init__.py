"""Search a pipeline's settings with Optuna; what is predicted to be slow is never started.

A sweeper of its own since 2026-11: Hydra's ``hydra-optuna-sweeper`` 1.3.0 asks for Optuna below 3
(of 2022), starts every trial it has asked for, and knows no trial that is skipped before it starts.
Here Optuna's ask-and-tell interface does the searching, and this file the asking.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import configure_log, setup_globals
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

__all__ = ["OptunaSweeper"]

log = logging.getLogger(__name__)


class OptunaSweeper(Sweeper):
    """``hydra/sweeper=pipeswift_optuna``: ask Optuna, predict, run, tell.

    Args:
        direction: ``minimize`` or ``maximize`` what the job returns.
        num_members: Members that are asked for, those that are not started included.
        sampler: An Optuna sampler; None is its TPE, with ``seed``.
        seed: Makes a search repeatable; None makes each another.
        params: The search space, in Hydra's notation: ``choice(1, 2, 4)``, ``range(1, 9)``,
            ``interval(0.0, 1.0)``, ``tag(log, interval(1e-5, 1e-2))``. Sweeps on the command line
            are added to it, and win; a key that the command line fixes is not searched.
        only_if: Conditions: a key of ``params``, and the values that others must have, which come
            before it. Else the key keeps the configuration's value.
        predict: Predicts a member's step time, as `StepPredictor` does; None starts every member.
        margin: A member is pruned if its predicted step is longer than the best measured one of
            its kind by more than this share.
        storage: Optuna's storage, a URL; None keeps the study in memory.
        study_name: The study's name in the storage.
    """

    def __init__(  # noqa: PLR0913 -- the keys of its configuration
        self,
        direction: Literal["minimize", "maximize"] = "minimize",
        num_members: int = 20,
        sampler: Any = None,
        seed: int | None = None,
        params: Mapping[str, str] | None = None,
        only_if: Mapping[str, Mapping[str, Any]] | None = None,
        predict: Any = None,
        margin: float = 0.25,
        storage: str | None = None,
        study_name: str | None = None,
    ) -> None:
        self._direction = direction
        self._num_members = num_members
        self._sampler = sampler
        self._seed = seed
        self._params = dict(params or {})
        self._only_if = {key: dict(needs) for key, needs in (only_if or {}).items()}
        self._predictor = predict
        self._margin = margin
        self._storage = storage
        self._study_name = study_name
        self._config: DictConfig | None = None
        self._context: HydraContext | None = None
        self._launcher: Launcher | None = None

    @override
    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._config = config
        self._context = hydra_context
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    @override
    def sweep(self, arguments: list[str]) -> None:
        from pipeswift_lightning.jobs.search import Search, SearchSpace

        assert self._config is not None
        assert self._context is not None
        setup_globals()
        HydraConfig.instance().set_config(self._config)
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        given = parser.parse_overrides(arguments)
        swept = {o.get_key_element(): o for o in given if o.is_sweep_override()}
        fixed = {o.get_key_element(): o for o in given if not o.is_sweep_override()}
        written = parser.parse_overrides([f"{k}={v}" for k, v in self._params.items()])
        space = SearchSpace(
            overrides={o.get_key_element(): o for o in written} | swept,
            only_if=self._only_if,
            fixed={key: str(o.get_value_element_as_str()) for key, o in fixed.items()},
        )
        search = Search(
            study=self._study(),
            space=space,
            run=self._run,
            compose=self._compose,
            predictor=self._predictor,
            margin=self._margin,
            folder=folder,
            fixed=[str(override.input_line) for override in fixed.values()],
        )
        for number in range(self._num_members):
            search.member(number)
        search.finish()

    def _study(self) -> Any:
        try:
            import optuna
        except ModuleNotFoundError as error:
            msg = "this sweeper needs Optuna: pip install 'pipeswift-lightning[sweeps]'"
            raise CompactHydraException(msg) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = self._sampler or optuna.samplers.TPESampler(n_startup_trials=5, seed=self._seed)
        return optuna.create_study(
            direction=self._direction,
            sampler=sampler,
            storage=self._storage,
            study_name=self._study_name,
            load_if_exists=True,
        )

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        assert self._context is not None
        assert self._config is not None
        return self._context.config_loader.load_sweep_config(self._config, list(overrides))

    def _run(self, number: int, overrides: Sequence[str]) -> Any:
        assert self._launcher is not None
        (answer,) = self._launcher.launch([list(overrides)], initial_job_idx=number)
        return answer
