"""``Trainer(strategy="pipeswift")``: Lightning's hooks, turned into runtime calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pipeswift_lightning.runtime.communication import CommunicationError
from pipeswift_lightning.strategies.argument import checked
from pipeswift_lightning.strategies.choice import choose_networks
from pipeswift_lightning.strategies.clipping import GlobalNorms
from pipeswift_lightning.strategies.closures import once
from pipeswift_lightning.strategies.contract import (
    check_callbacks,
    check_module,
    check_optimizers,
    leave_incomplete,
    one_optimizer,
    warn_of_short_epochs,
)
from pipeswift_lightning.strategies.deferred_requeue import DeferredRequeue
from pipeswift_lightning.strategies.devices import move_buffers, start_alike
from pipeswift_lightning.strategies.division import Division
from pipeswift_lightning.strategies.environment import leave_process_group
from pipeswift_lightning.strategies.gradient_scaler import forget_stages, share_found_inf
from pipeswift_lightning.strategies.handover import GradientHandover, skipped_loss, with_leaf_loss
from pipeswift_lightning.strategies.hooks import StepHook, StepRunner
from pipeswift_lightning.strategies.optimizers import unwrapped
from pipeswift_lightning.strategies.option_arguments import OPTION_ARGUMENTS
from pipeswift_lightning.strategies.options import OptionError, PipelineOptions
from pipeswift_lightning.strategies.repartition import MovableStrategy
from pipeswift_lightning.strategies.session import PipelineSession
from pipeswift_lightning.strategies.step_clock import StepClock

__all__ = ["PipeSwiftStrategy"]


class PipeSwiftStrategy(MovableStrategy):
    """Run an ordinary LightningModule as a pipeline.

    ``training_step`` runs once for each micro-batch, cut at the network's layers: each device runs
    its own layers, the last one the user's loss. Or it runs whole on each device, and only the
    networks' calls are cut. Gradients, metrics and checkpoints are those of one device.

    Args:
        stages: Number of stages. ``None``: one a device; fewer replicate the pipeline (with
            ``devices=4, stages=2``, 2 pipelines train, data parallel).
        micro_batches: Number of micro-batches in a batch, a list of their sizes in samples, or
            ``"auto"``.
        schedule: ``"1f1b"``, ``"gpipe"``, or ``"auto"``: what the costs choose, else 1F1B.
        warm_up: 1F1B's: a depth for each stage, or a factor from 1 to 2 (deeper hides latency).
        network: Attribute of the LightningModule that holds the network, or ``"self"``. ``None``
            finds it: the one child module with parameters, else ``model``, ``net``, ``network``.
            Several names, or ``None`` where every rank runs whole steps: several networks.
        partition: Layers of each stage; ``"uniform"``: as many in each; ``None``: balanced.
        loss: ``"per_sample"`` if the loss is a mean over samples (or tokens: see ``loss_weight``):
            each micro-batch's is weighted, and backwards begin early. ``"whole_batch"`` if it is
            not (a contrastive loss): it runs once on all outputs, with every micro-batch in
            flight. ``"transparent"`` if the step calls a network several times or optimises by
            hand: every rank runs the whole step. ``"auto"`` takes this where the module needs it;
            else it compares the other two in the first steps, and now and then.
        loss_weight: What a micro-batch's loss counts by: its ``"samples"``, or the ``"tokens"`` of
            ``batch["labels"]`` that are not -100. ``"auto"`` tries both. A method
            ``micro_batch_weight(micro_batch)`` of the LightningModule overrides it.
        weights: A safetensors file, or Hugging Face's folder, for a module that
            ``configure_model()`` builds on the meta device: each rank reads its own.
        dynamic_shapes: Set it if the shapes of activations depend on the data, not only on the
            shapes of the batch.
        receive_window: Receives posted ahead on each edge; see `plan.lowering.lower`.
        recompute: Layers whose activations are computed once more in backward, not kept: ``True``
            for all, so many of each stage, or a list with a number for each stage.
        compile: Run layers through ``torch.compile``: ``True``, a backend, or a dict of arguments.
        costs: A file of costs, or ``"measure"``. They choose what is not given: partition,
            micro-batches, order, warm-up, schedule. ``None``: equal runs of samples.
        trim: With costs, cut off padding that a micro-batch does not need; ``"auto"``: checked.
        memory_limit: With costs, bytes that a stage may take, or a list.
        order: With costs, the order of micro-batches: one of `plan.orders.ORDERS`.
        buckets: With costs, lengths to trim to, so that few shapes occur: a list, or a step.
        silence_s: Seconds without a sign of life after which a rank counts as lost.
        process_group_backend: ``"gloo"`` or ``"nccl"``; ``None`` chooses by device.
        timeout: Limit for set-up and for single collectives.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, or your cluster's.
        checkpoint_io: Set by the Trainer, or your plugin.
        precision_plugin: Set by the Trainer, or your plugin.

    Raises:
        OptionError: An argument is of another type, out of its range, or not known.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> import pipeswift_lightning
        >>> trainer = Trainer(
        ...     strategy=PipeSwiftStrategy(micro_batches=8), accelerator="cpu", devices=2,
        ...     logger=False, enable_checkpointing=False, enable_model_summary=False,
        ... )
    """

    strategy_name = "pipeswift"

    @checked(OPTION_ARGUMENTS, OptionError)
    def __init__(  # noqa: PLR0913 -- the user's knobs, then what Lightning itself passes
        self,
        *,
        stages: int | None = None,
        micro_batches: int | str | Sequence[int] | None = "auto",
        schedule: str = "auto",
        warm_up: Sequence[int] | float | None = None,
        network: str | Sequence[str] | None = None,
        partition: Sequence[int] | str | None = None,
        loss: str = "auto",
        loss_weight: str = "auto",
        weights: str | Path | None = None,
        dynamic_shapes: bool = False,
        receive_window: int | None = None,
        recompute: bool | int | Sequence[int] = False,
        compile: bool | str | Mapping[str, Any] = False,
        costs: str | Path | None = None,
        trim: bool | str = "auto",
        memory_limit: Sequence[float] | float | None = None,
        order: str = "searched",
        buckets: Sequence[int] | int | None = None,
        silence_s: float = 10.0,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = locals()
        names = (f.name for f in fields(PipelineOptions) if f.name in given)
        super().__init__(
            options=PipelineOptions.of(**{name: given[name] for name in names}),
            silence_s=silence_s,
            backend=process_group_backend,
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._weights = weights
        self._steps: StepRunner | None = None
        self._handover, self._clock = GradientHandover(), StepClock()
        self._norms: GlobalNorms | None = None
        self._sync_gradients = True

    # -- set-up -------------------------------------------------------------------------------

    @override
    def check_before_start(self, trainer: Trainer) -> None:
        module = self.lightning_module
        if module is None:
            return
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_module(module, fitting=fitting)
        check_callbacks(trainer.callbacks, self.mesh)  # type: ignore[attr-defined]
        # A module may make its layers only in these hooks, which run on every rank.
        if not any(is_overridden(hook, module) for hook in ("setup", "configure_model")):
            choose_networks(module, self.options, self.mesh)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        check_module(module, fitting=fitting)
        self.precision_plugin.convert_module(module)
        networks, why = choose_networks(module, self.options, self.mesh)
        self._division = Division.of(module, self._weights, whole=self.mesh.num_stages == 1)
        self.model_to_device()
        if self._collectives is not None and self.mesh.world_size > 1:
            start_alike(module, self._collectives, self.root_device)
        options = self.options.for_stages(self.mesh.num_stages)
        self._session = PipelineSession(
            module,
            networks[0],
            self.groups,
            options,
            self.root_device,
            self._watch.progress,
            self,
            self._assembly,
        )
        self._steps = StepRunner(self._session, self.options)
        if fitting:
            with one_optimizer():
                self.setup_optimizers(trainer)
            check_optimizers(module, self.optimizers)
            self._names.remember(module, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            assert self._collectives is not None
            self._norms = GlobalNorms(self._session, self._collectives)
            self._norms.install(self.precision_plugin)
            scaler = getattr(self.precision_plugin, "scaler", None)
            share_found_inf(scaler, self.root_device, self._collectives.sum_over_stages)
            if DeferredRequeue.needed(trainer):
                trainer.callbacks.append(DeferredRequeue())  # type: ignore[attr-defined]
        if why is not None:
            self._session.make_transparent(networks, why)
        self._session.open()
        self._clock.data_wait.install(trainer.profiler)  # type: ignore[attr-defined]

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        if self.mesh.num_stages == 1:
            self.lightning_module.to(self.root_device)
        else:
            move_buffers(self.lightning_module, self.root_device)

    # -- steps --------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        warn_of_short_epochs(self.lightning_module.trainer)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._steps is not None:
            self._steps.close()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        aside = self.session.transparent is None
        self._begin_step()
        if aside:
            self._handover.begin(module)
        output = self._run(StepHook.TRAINING, args, kwargs)
        if aside:
            self._handover.end(self.session.local_parameters(), skipped=output is None)
        self._after_step()
        self._clock.computed(self.session)
        one_pipeline = self.mesh.num_stages == self.mesh.world_size > 1
        if output is None and module.automatic_optimization and one_pipeline:
            return skipped_loss(self.root_device)
        # A step that every rank runs whole has a loss with a graph, for Lightning to walk.
        return output if self.session.transparent is not None else with_leaf_loss(output)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.VALIDATION, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.TEST, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(StepHook.PREDICT, args, kwargs)

    def _run(self, hook: StepHook, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._steps is not None
        try:
            return self._steps.run(hook, (*args, *kwargs.values()), self.precision_plugin)
        except CommunicationError as error:
            raise self._watch.root_cause(error, self.mesh) from None

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Hand the step's gradients over, between the hooks that Lightning calls around it."""
        module = self.lightning_module
        assert module is not None
        if self.session.transparent is not None:
            return self._backward(closure_loss, optimizer, *args, **kwargs)
        # The hooks alone: a scaling plugin must not touch a loss that is only looked at.
        Precision.pre_backward(self.precision_plugin, closure_loss, module)
        self._handover.hand_over()
        self._reduce_gradients()
        return Precision.post_backward(self.precision_plugin, closure_loss, module)

    def _backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kw: Any) -> Tensor:
        """Walk the graph of a step that every rank has run whole."""
        try:
            result = super().backward(loss, optimizer, *args, **kw)
        except CommunicationError as error:
            raise self._watch.root_cause(error, self.mesh) from None
        self._reduce_gradients()
        return result

    def _reduce_gradients(self) -> None:
        if self._sync_gradients:
            assert self._collectives is not None
            with self._clock.reducing(self.session):
                self._collectives.guarded("reducing gradients", self.session.reduce_gradients)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self.mesh.num_stages > 1:
            closure = once(closure, unwrapped(optimizer))
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._clock.updated(self.session)
        self._end_step()
        return result

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients accumulate they are not reduced: once a step is enough."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    @override
    def step_state(self) -> dict[str, Any]:
        return {} if self._steps is None else self._steps.state()

    @override
    def load_step_state(self, state: Mapping[str, Any]) -> None:
        if self._steps is not None and state:
            self._steps.load_state(state)

    # -- the end ------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed(exception)
        if self.mesh.world_size > 1 and dist.is_initialized():
            # Closing the connections is what wakes peers that wait for this rank.
            if self._session is not None:
                self._session.hang_up()
            if self._groups is not None:
                self._groups.close()
            leave_process_group()
            self._groups = None
            self._collectives = None

    @override
    def teardown(self) -> None:
        self._clock.data_wait.remove()
        if self._steps is not None:  # an interrupted training has not ended otherwise
            self._steps.close()
        healthy = self._groups is not None and not self._watch.failed
        if healthy:
            self.finish_saves()
            self.finish_restoring()
        self._close_saver()
        session, self._session = self._session, None
        whole = healthy or session is None or session.share is None
        if session is not None and healthy and self._collectives is not None:
            self._collectives.guarded(
                "making the module whole again", lambda: session.close(bring_back=True)
            )
        elif session is not None:
            if not whole:
                leave_incomplete(session.module)
            session.close(bring_back=False)
        if self._norms is not None:
            self._norms.remove(self.precision_plugin)
        forget_stages(getattr(self.precision_plugin, "scaler", None))
        if whole and self._is_divided:
            self._release_divided()
        elif self._has_all_data:  # else it cannot be moved
            super().teardown()
        self._watch.stop()
        if self._made_group and self.mesh.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()  # no ranks, no cost; another Trainer may want more
            self._groups = self._collectives = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Pipeline parallelism (pipeswift-lightning)"
            )
