"""Profile a LightningModule by its own training step, with no Trainer running."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pipeswift_lightning.plan.profile import CostProfile
from pipeswift_lightning.runtime.profiler import (
    ProfileOptions,
    Subject,
    example_micro_batches,
    obtain_profile,
    origin_of,
    profile_network,
)
from pipeswift_lightning.runtime.trace import StepTrace
from pipeswift_lightning.strategies.hugging_face import without_caches
from pipeswift_lightning.strategies.module_state import unchanged
from pipeswift_lightning.strategies.network import PipelinedNetwork, chained, find_network
from pipeswift_lightning.strategies.records import recorded

__all__ = ["module_subject", "profile_module"]


@contextmanager
def module_subject(
    module: LightningModule,
    network: PipelinedNetwork,
    device: torch.device,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    trace: StepTrace | None = None,
) -> Iterator[Subject]:
    """Give the module's training step as something to measure; the module stays as it is.

    Args:
        module: The user's module.
        network: Its network, which is to be pipelined.
        device: Where its layers are to run.
        context: The precision plugin's context for the step.
        trace: The order of the layers, if it is known already.
    """
    numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def run(batch: Any) -> Any:
        with recorded(module), context():
            return module.training_step(batch, 0) if numbered else module.training_step(batch)

    with ExitStack() as stack:
        stack.enter_context(without_caches(module))
        stack.enter_context(unchanged(module))
        if network.chain:
            before = dict(vars(network.module))
            network.module.__dict__.update(chained(network))
            stack.callback(_restore, network.module, before)
        yield Subject(module, network.layers, run, device, trace, network.module)


def _restore(module: torch.nn.Module, before: dict[str, Any]) -> None:
    module.__dict__.pop("forward", None)
    module.__dict__.update({"forward": before["forward"]} if "forward" in before else {})


def profile_module(  # noqa: PLR0913 -- one argument a choice, so that `profile.path=` works
    module: LightningModule,
    data: LightningDataModule,
    trainer: Trainer,
    *,
    network: str | None = None,
    path: str | None = None,
    samples: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    options: ProfileOptions | None = None,
    tell: Callable[[float], None] | None = None,
) -> CostProfile:
    """Measure the network of ``module`` on the first batch of ``data``.

    Args:
        module: The user's module; on the meta device it is measured with weights drawn at random.
        data: Gives the batch.
        trainer: Its device and precision are used; it does not run.
        network: Name of the network, as for the strategy.
        path: A file to use if it still holds, and else to write.
        samples: Numbers of samples of the micro-batches (see `example_micro_batches`).
        lengths: Their lengths.
        options: How often to measure.
        tell: Is called between passes, with the share that is done.
    """
    options = options or ProfileOptions()
    device = trainer.strategy.root_device
    module.configure_model()
    precision = trainer.precision_plugin
    module = precision.convert_module(module)  # type: ignore[assignment]
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    batch = precision.convert_input(move_data_to_device(batch, device))
    micro_batches = example_micro_batches(batch, sizes=samples, lengths=lengths)
    found = find_network(module, network)
    with module_subject(module, found, device, context=precision.forward_context) as subject:
        return obtain_profile(
            path,
            origin_of(module, found.layers, device, options.settings),
            lambda: profile_network(subject, micro_batches, options=options, tell=tell),
        )
