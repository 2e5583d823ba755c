"""The model a new run starts from, traced in a process of its own: the server itself never loads torch.

`python -m fedmpq.server.first_model_process FOLDER` reads the wanted model as JSON from standard input and
leaves `graph` and `model` in FOLDER.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from fedmpq.method.archive import Tensors, pack_model
from fedmpq.model.first_model import ImageFormat, make_first_model
from fedmpq.server.earlier_run import earlier_weights
from fedmpq.server.run_config import ConfigError, Images, RunConfig

_USAGE_ERROR = 2


async def first_model(config: RunConfig, images: Images) -> tuple[bytes, bytes]:
    """The graph's bytes and those of the first global model."""
    recipe = config.recipe()
    wanted = {
        "name": config.model,
        "seed": config.seed,
        "classes": len(images.class_names),
        "image": asdict(images.format),
        "activation_bits": recipe.activation_bits,
        "task": config.task,
        "first_clips": recipe.first_clips,
    }
    request = {"model": wanted, "weights": config.weights}
    with tempfile.TemporaryDirectory(prefix="fedmpq-") as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fedmpq.server.first_model_process", folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate(json.dumps(request).encode())
        if process.returncode:
            message = errors.decode(errors="replace").strip()
            if process.returncode != _USAGE_ERROR:
                message = f"the process that traces it ended with {process.returncode}: {message}"
            raise ConfigError(f"model = {config.model!r}: {message}")
        return (Path(folder) / "graph").read_bytes(), (Path(folder) / "model").read_bytes()


def main() -> int:
    folder, request = Path(sys.argv[1]), json.load(sys.stdin)
    wanted = request["model"]
    wanted["image"] = ImageFormat(**wanted["image"])
    try:
        graph, weights, side = make_first_model(**wanted)
        if request["weights"] is not None:
            weights, side = earlier_weights(request["weights"]).start(graph, weights, side)
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed; install it: pip install 'fedmpq[lab]'", file=sys.stderr)
        return _USAGE_ERROR
    except ValueError as error:
        if not type(error).__module__.startswith("fedmpq."):
            raise
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return _USAGE_ERROR
    (folder / "graph").write_bytes(graph.to_bytes())
    (folder / "model").write_bytes(pack_model(Tensors(weights, side)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
