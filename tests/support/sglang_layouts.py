"""Compares layouts with what SGLang's own model classes do, without a server. Runs inside an SGLang environment:

    python -m tests.support.sglang_layouts TP EP PORT MODEL_DIRECTORY …

One process a rank builds one model after the other (dummy weights), asks the rule table, probes the engine's loader,
and loads random bits; `<rank>.json` in the model's directory says where the three disagree. A model needs only a
config.json. With a tensors.json (name, shape, dtype of every canonical tensor) the probe stands in for the table.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

JOIN_S = 400


class Engine:
    """The parts of SGLang that one rank needs to make models, set up for the parallel shape once."""

    def __init__(self, first: str, rank: int, tp: int, ep: int, port: int) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.distributed import bootstrap
        from sglang.srt.runtime_context import SpawnRanks, publish

        self._rank, self._tp, self._ep = rank, tp, ep
        arguments = self._arguments(first)
        world_rank = one_batch.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
        one_batch._init_process_global_configs()
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)

    def _arguments(self, model: str) -> Any:
        import argparse

        from sglang.benchmark import one_batch
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        options = {
            "model-path": model, "device": "cpu", "tp-size": self._tp, "ep-size": self._ep,
            "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
            "context-length": 512, "max-total-tokens": 1024, "max-running-requests": 2,
        }  # fmt: skip
        words = [w for name, value in options.items() for w in (f"--{name}", str(value))]
        arguments = ServerArgs.from_cli_args(
            parser.parse_args([*words, "--disable-cuda-graph", "--skip-tokenizer-init"])
        )
        if hasattr(one_batch, "resolve_server_args"):
            arguments = one_batch.resolve_server_args(arguments) or arguments
        return arguments

    def model(self, path: str) -> Any:
        """This rank's model as the engine makes it."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.model_loader import get_model

        config = ModelConfig.from_server_args(self._arguments(path))
        bootstrap.init_layer_runtime(model_config=config)
        return get_model(
            model_config=config,
            load_config=LoadConfig(load_format="dummy"),
            device_config=DeviceConfig("cpu", self._rank),
        )


def run_rank(models: list[str], rank: int, tp: int, ep: int, port: int) -> None:
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    engine = Engine(models[0], rank, tp, ep, port)
    for model in models:
        report = compare(engine.model(model), model, tp, ep)
        (Path(model) / f"{rank}.json").write_text(json.dumps(report))


def compare(live: Any, model: str, tp: int, ep: int) -> dict[str, Any]:
    import numpy as np
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_parallel

    from engine.layout.mapping import map_partial
    from engine.layout.placement import Placement
    from engine.models import layouts_for
    from engine.probe import memory_of, probe
    from engine.probe.tags import Numbering, pattern_words, read_words
    from engine.records import TensorMeta

    parallel = get_parallel()
    config = json.loads((Path(model) / "config.json").read_text())
    listed = Path(model) / "tensors.json"
    if listed.exists():
        rows = json.loads(listed.read_text())
        metas = [TensorMeta(name=name, shape=shape, dtype=dtype) for name, shape, dtype in rows]
    else:
        tables = [layouts_for(config, r, tp, r // (tp // ep), ep) for r in range(tp)]
        metas = list({p.tensor.name: p.tensor for t in tables for ps in t.values() for p in ps}.values())

    def load(named: Any) -> None:
        DefaultModelLoader.load_weights_and_postprocess(live, named, torch.device("cpu"))

    def parameters() -> dict[str, torch.Tensor]:
        return dict(live.named_parameters())

    def indices(placements: list[Placement], numel: int) -> set[tuple[str, int, int]]:
        pairs: set[tuple[str, int, int]] = set()
        for p in placements:
            at = map_partial(p.layout, np.arange(numel))
            pairs |= {(p.tensor.name, i, c) for i, c in enumerate(at.tolist()) if c >= 0}
        return pairs

    found = probe(metas, load, parameters)
    if listed.exists():
        table = found.placements
    else:
        table = layouts_for(config, parallel.tp_rank, parallel.tp_size, parallel.moe_ep_rank, parallel.moe_ep_size)
    strangers = sorted(found.placements.keys() ^ table.keys())
    wrong = [f"parameters differ: {strangers}"] if strangers else []
    for name, memory in parameters().items():
        if indices(found.placements.get(name, []), memory.numel()) != indices(table.get(name, []), memory.numel()):
            wrong.append(f"{name}: the probe and the table disagree")

    numbering = Numbering(metas)
    for memory in parameters().values():
        memory.detach().zero_()
    load((t.name, numbering.pattern(k, 9)) for k, t in enumerate(metas))
    start = {t.name: int(s) for t, s in zip(metas, numbering.starts, strict=False)}
    for name, parameter in parameters().items():
        words = read_words(memory_of(name, parameter))
        for p in table.get(name, []):
            at = map_partial(p.layout, np.arange(words.size))
            here = at >= 0
            if not np.array_equal(words[here], pattern_words(at[here] + start[p.tensor.name], p.tensor.dtype, 9)):
                wrong.append(f"{name}: loading put other bits than the table says of {p.tensor.name}")
    return {
        "class": type(live).__name__,
        "coordinates": [parallel.tp_rank, parallel.tp_size, parallel.moe_ep_rank, parallel.moe_ep_size],
        "parameters": len(parameters()),
        "tensors": len(metas),
        "wrong": wrong,
        "not_identity": found.not_identity,
        "absent": sorted(found.absent),
        "unwritten": found.unwritten,
        "dtypes": sorted({p.tensor.dtype for ps in found.placements.values() for p in ps}),
        "blocks": max(len(p.layout.blocks) for ps in found.placements.values() for p in ps),
    }


def main() -> int:
    tp, ep, port = (int(word) for word in sys.argv[1:4])
    if tp > 1:
        cpus = os.cpu_count() or 1
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r % cpus) for r in range(tp))
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=run_rank, args=(sys.argv[4:], r, tp, ep, port)) for r in range(tp)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(JOIN_S)
    failed = [r for r, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
