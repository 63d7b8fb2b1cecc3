"""`dte demo`: trains, ships every policy version, and says at the end whether the receivers hold the trainer's bits.

Rollouts come from processes of the demo's own, or from an SGLang server. Invariant: the verdict comes from comparing
parameters, not from any proof of dte's own, and whatever happens, every process, socket and shared-memory file of the
demo is gone when this returns.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.cli.stopping import terminate_as_exit
from app.demo.table import DemoTable, Row

if TYPE_CHECKING:
    from app.demo.grpo import GenerateRequest, Grpo, Rollout
    from app.demo.model import Policy
    from app.demo.record import Recorder
    from app.demo.rollouts import Rollouts, Verdict
    from app.demo.stage import Stage
    from clients.control import ControlClient
    from clients.protocol import Job, ReceiverInfo
    from clients.trainer import TorchSource

RUN = "demo"
VERSION_TIMEOUT_S = 180.0
LOOK_EVERY_S = 5.0
EXIT_NOT_EXACT = 1

Engine = Literal["torch", "sglang"]
Transport = Literal["store", "p2p"]


@dataclass(frozen=True)
class DemoOptions:
    """What `dte demo` was asked for. `sglang_url`: a server that runs already; None starts one."""

    steps: int = 5
    receivers: int = 1
    minibatches: int = 1
    seed: int = 0
    json_output: bool = False
    record: Path | None = None
    keep: bool = False
    engine: Engine = "torch"
    transport: Transport = "store"
    sglang_python: Path | None = None
    sglang_url: str | None = None


def run_demo(options: DemoOptions, load: Callable[[int], Policy] | None = None) -> int:
    """Run it all; returns the exit code. Raises DteError when something cannot be started or fails on the way.

    `load`: makes the policy from the seed; SmolLM2-135M if not given.
    """
    started = time.monotonic()
    with terminate_as_exit(), DemoTable(pauses=options.engine == "sglang") as table:
        outcome = _run(options, table, load)
    return conclude(outcome, time.monotonic() - started, options)


@dataclass(frozen=True)
class Outcome:
    """What a demo leaves behind. `waited_ms`: how long optimizer steps waited for reads, in all."""

    rows: list[Row]
    verdict: Verdict
    waited_ms: float
    workdir: Path


def conclude(outcome: Outcome, seconds: float, options: DemoOptions) -> int:
    """Print the verdict; returns the exit code."""
    exact = outcome.verdict.exact
    for c in outcome.verdict.comparisons:
        differing = f"{c.differing_elements} elements differ, in {', '.join(c.differing_tensors[:5])}"
        verdict = "bit-exact" if c.bit_exact else differing
        print(f"{c.receiver}: {c.tensors} tensors, {c.elements:,} parameters compared with the trainer's: {verdict}")
    reload = outcome.verdict.reload
    if reload is not None:
        checksums = f"{len(reload.differing_parameters)} of {reload.parameters} checksums differ"
        answers = f"{reload.differing_answers} of {reload.prompts} greedy answers differ"
        changed = f"{reload.changed_parameters} of them changed since the start"
        verdict = f"same {reload.parameters} checksums ({changed}), same {reload.prompts} greedy answers"
        print(
            f"a second SGLang server, started from version {reload.version} on disk: "
            f"{verdict if reload.same else f'{checksums}, {answers}'}"
        )
    deltas = [r for r in outcome.rows if r.version is not None and r.version > 0]
    print(
        f"{'BIT-EXACT' if exact else 'NOT BIT-EXACT'} after {len(deltas)} versions on {options.receivers} "
        f"receiver{'s' if options.receivers > 1 else ''} in {seconds:.0f} s"
    )
    if options.transport == "p2p":
        print(f"{sum(r.path == 'p2p' for r in deltas)} of {len(deltas)} versions went rank to rank")
    if options.keep:
        print(f"store and logs are kept in {outcome.workdir}")
    if options.json_output:
        print(json.dumps(_summary(outcome, deltas, exact, seconds, options)))
    return 0 if exact else EXIT_NOT_EXACT


def _summary(outcome: Outcome, deltas: list[Row], exact: bool, seconds: float, options: DemoOptions) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values) if values else 0.0

    changed = sum(r.changed for r in deltas)
    reload = outcome.verdict.reload
    pauses = [r.pause_ms for r in deltas if r.pause_ms is not None]
    return {
        "engine": options.engine,
        "transport": options.transport,
        "versions": len(deltas),
        "bit_exact": exact,
        "changed_fraction": median([r.changed_fraction for r in deltas]),
        "bytes_per_version": median([float(r.bytes) for r in deltas]),
        "bits_per_entry": 8 * sum(r.bytes for r in deltas) / changed if changed else None,
        "trainer_hold_ms": median([r.hold_ms for r in deltas]),
        "trainer_waited_ms": outcome.waited_ms,
        "receiver_lag_ms": median([r.lag_ms for r in deltas]),
        "engine_pause_ms": median(pauses) if pauses else None,
        "reload": None if reload is None else {**asdict(reload), "same": reload.same},
        "receivers": options.receivers,
        "minibatches": options.minibatches,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "per_version": [asdict(r) for r in outcome.rows],
    }


def _run(options: DemoOptions, table: DemoTable, load: Callable[[int], Policy] | None) -> Outcome:
    from app.demo.stage import Stage

    with Stage(RUN, keep=options.keep, p2p=options.transport == "p2p") as stage:
        rollouts = _rollouts(options, stage)
        table.note("starting the daemons")
        stage.start_daemons()
        table.note("loading the model")
        import torch

        from app.demo.grpo import Grpo, GrpoSettings
        from app.demo.model import load_policy
        from clients.control import ControlClient
        from clients.trainer import TorchSource

        policy = (load or load_policy)(options.seed)
        rollouts.start(policy)
        settings = GrpoSettings(minibatches=options.minibatches)
        optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        grpo = Grpo(policy.model, policy.tokenizer, settings, seed=options.seed, optimizer=optimizer)
        rollouts.connect(table.note)
        recorder = _recorder(options, policy.model)
        source = TorchSource(policy.model, optimizer, daemon=stage.trainer_url, run=RUN)
        with (
            ControlClient(stage.trainer_url, run=RUN) as versions,
            ControlClient(stage.rollout_url, run=RUN) as receivers,
            source,
        ):
            loop = _Loop(options, table, stage, grpo, source, versions, receivers, rollouts, recorder)
            loop.ship_first()
            loop.train()
            waited_ms = source.stats.hold_ms
            verdict = rollouts.finish(policy.model, loop.installed, table.note)
        return Outcome(loop.rows, verdict, waited_ms, stage.workdir)


def _rollouts(options: DemoOptions, stage: Stage) -> Rollouts:
    if options.engine == "sglang":
        from app.demo.sglang_rollouts import SglangRollouts

        return SglangRollouts(
            stage,
            python=options.sglang_python,
            url=options.sglang_url,
            seed=options.seed,
            transport=options.transport,
        )
    from app.demo.rollouts import TorchRollouts

    return TorchRollouts(stage, options.receivers, options.transport)


def _recorder(options: DemoOptions, model: Any) -> Recorder | None:
    if options.record is None:
        return None
    from app.demo.record import Recorder

    return Recorder(options.record, list(model.named_parameters()))


class _Loop:
    """Rollout from the receivers, optimizer steps, sync, wait for the receivers; again. `installed`: their version."""

    def __init__(
        self,
        options: DemoOptions,
        table: DemoTable,
        stage: Stage,
        grpo: Grpo,
        source: TorchSource,
        versions: ControlClient,
        receivers: ControlClient,
        rollouts: Rollouts,
        recorder: Recorder | None,
    ) -> None:
        self.rows: list[Row] = []
        self.installed = 0
        self._sampled: dict[str, int] = {}
        self._options = options
        self._table = table
        self._stage = stage
        self._grpo = grpo
        self._source = source
        self._versions = versions
        self._receivers = receivers
        self._rollouts = rollouts
        self._recorder = recorder
        # The first optimizer step has learning rate 0. If it is all there is between two syncs, that sync publishes
        # nothing; one more update makes up for it.
        self._updates = options.steps + (1 if options.minibatches == 1 else 0)
        self._last_step = self._updates * options.minibatches

    def ship_first(self) -> None:
        """Wait for version 0, which registering published, to arrive everywhere."""
        self._table.note("shipping version 0, the whole model")
        started = time.monotonic()
        info = self._versions.wait_for_version(0, VERSION_TIMEOUT_S)
        receivers = self.wait_for_receivers(info.version)
        self.installed = info.version
        self._add(self._row(info.version, 0, info.timings_ms, (time.monotonic() - started) * 1e3, receivers, None))

    def train(self) -> None:
        """All updates, one sync each."""
        if self._recorder is not None:
            self._grpo.optimizer.register_step_pre_hook(lambda *_: self._before_step())
        for update in range(self._updates):
            what = f"update {update + 1} of {self._updates}"
            self._table.note(f"{what}: the receivers generate from version {self.installed}")
            self._stage.check()
            rollout = self._grpo.collect(self._generate)
            self._table.note(f"{what}: training")
            for count, stats in enumerate(self._grpo.update(rollout), start=1):
                publish = count == self._options.minibatches
                handle = self._source.sync(stats.step, publish=publish)
                if self._recorder is not None and stats.step == self._last_step:
                    self._record(self._recorder, stats.step)
                if publish:
                    self._table.note(f"{what}: shipping")
                    self._ship(handle.wait(VERSION_TIMEOUT_S), rollout)
            self._stage.check()

    def _generate(self, request: GenerateRequest) -> list[list[int]]:
        sampled = self._rollouts.generate(request)
        self._sampled = sampled.from_version(self.installed)
        return sampled.completions

    def _ship(self, job: Job, rollout: Rollout) -> None:
        from clients.protocol import JobState

        if job.state is JobState.COMMITTED and job.version is not None:
            started = time.monotonic()
            receivers = self.wait_for_receivers(job.version)
            lag_ms = (time.monotonic() - started) * 1e3
            self.installed = job.version
            self._add(self._row(job.version, job.step, job.timings_ms, lag_ms, receivers, rollout))
        elif job.state is JobState.UNCHANGED:
            self._add(
                Row(
                    None,
                    job.step,
                    timings_ms=dict(job.timings_ms),
                    hold_ms=_hold_ms(job.timings_ms),
                    reward=rollout.mean_reward,
                    sample=rollout.sample,
                    sampled_from=self._sampled,
                )
            )
        else:
            from clients.errors import JobFailed

            raise JobFailed(job)

    def wait_for_receivers(self, version: int) -> list[ReceiverInfo]:
        """Until all serve the version; ReceiverFailed at once when one is given up, ChildFailed when a process ends."""
        from app.demo.link import ReceiverFailed
        from clients.errors import WaitTimeout
        from clients.protocol import ReceiverState

        deadline = time.monotonic() + VERSION_TIMEOUT_S
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return self._receivers.wait_for_receivers(
                    version, min(left_s, LOOK_EVERY_S), count=len(self._rollouts.names)
                )
            except WaitTimeout:
                self._stage.check()
                for receiver in self._receivers.receivers():
                    if receiver.state is ReceiverState.FAILED:
                        raise ReceiverFailed(f"{receiver.name} was given up: {receiver.last_error}") from None
                if left_s <= LOOK_EVERY_S:
                    raise

    def _row(
        self,
        version: int,
        step: int,
        timings: dict[str, float],
        lag_ms: float,
        receivers: list[ReceiverInfo],
        rollout: Rollout | None,
    ) -> Row:
        proofs = {r.proof for r in receivers}
        paths = {r.path for r in receivers}
        pauses = [r.last_install_ms["pause"] for r in receivers if "pause" in r.last_install_ms]
        info = self._versions.version(version)
        return Row(
            version=version,
            step=step,
            elements=info.elements,
            changed=info.changed,
            changed_fraction=info.changed_fraction,
            bytes=info.bytes,
            bits_per_entry=info.bits_per_entry if info.base is not None else None,
            timings_ms=dict(timings),
            hold_ms=_hold_ms(timings),
            lag_ms=lag_ms,
            proof=proofs.pop() if len(proofs) == 1 else "mixed",
            path=paths.pop() if len(paths) == 1 else "mixed",
            pause_ms=max(pauses, default=None),
            reward=None if rollout is None else rollout.mean_reward,
            sample="" if rollout is None else rollout.sample,
            dense_tiles=info.dense_tiles,
            sampled_from={} if rollout is None else self._sampled,
        )

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._table.add(row)

    def _before_step(self) -> None:
        if self._recorder is not None and self._grpo.step_count + 1 == self._last_step:
            self._recorder.before()

    def _record(self, recorder: Recorder, step: int) -> None:
        from clients.trainer.formulas import formula_name, hyper_of
        from engine.optimizers.base import Hyper

        group = self._grpo.optimizer.param_groups[0]
        spec = hyper_of(self._grpo.optimizer, group)
        recorder.after(
            self._grpo.optimizer, formula_name(self._grpo.optimizer, group), Hyper(**spec.model_dump()), step
        )


def _hold_ms(timings: dict[str, float]) -> float:
    """How long the trainer's next step would have had to wait: from the post to the release."""
    return timings.get("hold", timings.get("read", 0.0))
