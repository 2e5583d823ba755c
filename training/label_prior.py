"""Clients that have other classes than the rest must not teach the model that theirs are the likely ones.

A softmax learns how often a class is as well as what it looks like. Where every client has classes of its
own, the first is what they contradict each other in: after an epoch each guesses its own frequent classes,
and the average of many such models is worth less than any of them. So the frequencies are told to the loss
(logit adjustment, Menon et al. 2021; FedLC, Zhang et al. 2022): with `n_c` of the client's `N` samples in
class `c` of `C`, the loss is that of the logits `z_c + tau ln q_c`,

    q_c = (n_c + 1) C / (N + C)

`tau` being the plan's `logit_adjustment`. What is left for `z` to learn, for `tau` = 1, is what classes look
like: the logits of a model for which all are equally likely. Nothing of this leaves the client.
"""

from __future__ import annotations

import numpy as np

from fedmpq.data.dataset import Labels
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import Graph
from fedmpq.model.pointwise import logarithm
from fedmpq.model.task import CLASSIFICATION
from fedmpq.training.engine import Shift


def logit_shift(graph: Graph, plan: TrainingPlan, labels: Labels) -> Shift | None:
    """`tau ln q_c` of a client with these labels; None where nothing is to be added. Other tasks than
    classification have no classes of which one is to be told from the rest."""
    if not plan.logit_adjustment or graph.task != CLASSIFICATION:
        return None
    classes = graph.shapes[graph.output][0]
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    shares = (counts + 1.0) * (classes / (len(labels) + classes))
    return np.asarray(plan.logit_adjustment * logarithm(shares), np.float32)
