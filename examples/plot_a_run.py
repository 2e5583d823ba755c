"""Read a run, of a simulation or of a server, and plot how accurate each budget's devices are.

python examples/plot_a_run.py runs/fedmpq-best-resnet20-0 run.png
"""

import sys

import matplotlib.pyplot as plt

import fedmpq

folder, picture = sys.argv[1:]
run = fedmpq.load_run(folder)
figure, axes = plt.subplots()
for column in run.history.columns:
    if column.startswith("accuracy_"):
        measured = [(row["round"], row[column]) for row in run.history if row.get(column) is not None]
        axes.plot(*zip(*measured, strict=True), marker="o", label=column.split("_")[1] + " bits")
axes.set(xlabel="round", ylabel="accuracy", title=run.name)
axes.legend()
figure.savefig(picture)
print(f"{len(run.history)} rounds of {run.name} in {picture}")
