"""Inference by ONNX Runtime on an emulated board, with a mark before and after each model's run.

`counted_inference.py FOLDER` runs every FOLDER/NAME.onnx on FOLDER/NAME.npy and prints the names, in order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from tools.instruction_marks import AFTER, BEFORE, marker

ERRORS_ONLY = 3


def main() -> None:
    before, after = marker(BEFORE), marker(AFTER)
    models = sorted(Path(sys.argv[1]).glob("*.onnx"))
    for model in models:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = ERRORS_ONLY
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        images = {session.get_inputs()[0].name: np.load(model.with_suffix(".npy"))}
        # The first run allocates.
        session.run(None, images)
        before()
        session.run(None, images)
        after()
    print(json.dumps([model.stem for model in models]))


if __name__ == "__main__":
    main()
