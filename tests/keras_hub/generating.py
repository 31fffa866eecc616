"""Generates in each process of a job, and prints what each process found."""

import json

import jax
import keras
import keras_hub
import numpy as np
from jax.experimental import multihost_utils

import keras_strategies as ks

ROWS, SIZE, PROMPT, WORDS = 4, 16, 5, 64
SHARDED = ks.experimental.FullySharded(min_size=64)


def build(sampler="greedy"):
    """A task whose outputs depend on each of its prompt's words."""
    keras.utils.set_random_seed(1)
    models = keras_hub.models
    backbone = models.GPT2Backbone(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=SIZE,
        dropout=0.0,
    )
    task = models.GPT2CausalLM(backbone, preprocessor=None)
    task.compile(
        "sgd",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler=sampler,
    )
    random = np.random.default_rng(3)
    for weight in task.trainable_weights:
        noise = random.normal(scale=0.4, size=weight.shape)
        weight.assign(weight + noise.astype("float32"))
    return task


def draw_prompts(seed):
    drawn = np.random.default_rng(seed).integers(1, WORDS, (ROWS, SIZE))
    mask = np.repeat(np.arange(SIZE)[None] < PROMPT, ROWS, 0)
    return {
        "token_ids": (drawn * mask).astype("int32"),
        "padding_mask": mask.astype("int32"),
    }


def generate(task, seed):
    return task.generate(draw_prompts(seed), stop_token_ids=None)[
        "token_ids"
    ].tolist()


def attempt(task, alone, seed, method=generate):
    """Returns whether one device generates the same, or the error's text."""
    try:
        found, wanted = method(task, seed), method(alone, seed)
        return bool(np.allclose(found, wanted, atol=1e-3))
    except ValueError as error:
        return str(error)


def score(task, seed):
    prompts = draw_prompts(seed)
    scores = task.score(**prompts, scoring_mode="logits")
    if not scores.is_fully_addressable:
        scores = multihost_utils.process_allgather(scores, tiled=True)
    return np.asarray(scores)


class Generate(keras.callbacks.Callback):
    """Generates at the end of each epoch."""

    def __init__(self, alone):
        super().__init__()
        self.alone, self.found = alone, []

    def on_epoch_end(self, epoch, logs=None):
        self.alone.set_weights(self.model.get_weights())
        self.found.append(attempt(self.model, self.alone, 0))


def find(partitioner):
    strategy = ks.MultiWorkerMirroredStrategy(variable_partitioner=partitioner)
    process = jax.process_index()
    alone = build()
    with strategy.scope():
        task = build()
        in_scope = attempt(task, alone, 0)
    found = {
        "in scope": in_scope,
        "equal prompts": attempt(task, alone, 0),
        "other prompts": attempt(task, alone, process),
        "scores": attempt(task, alone, 0, score),
        "other scores": attempt(task, alone, process, score),
    }
    if partitioner is None and process == 0:
        found["one process"] = attempt(task, alone, 7)
    callback = Generate(alone)
    rows = np.random.default_rng(1).integers(1, WORDS, (10, SIZE))
    x = {"token_ids": rows, "padding_mask": np.ones_like(rows)}
    task.fit(
        *(x, np.roll(rows, -1, 1)),
        **{"batch_size": 4, "epochs": 2, "verbose": 0},
        callbacks=[callback],
    )
    return found | {"in a callback": callback.found}


def main():
    found = {"mirrored": find(None), "sharded": find(SHARDED)}
    strategy = ks.MultiWorkerMirroredStrategy(variable_partitioner=SHARDED)
    # Random seeds, which differ between the processes.
    seed = int(np.random.SeedSequence().entropy % 2**31)
    sampler = keras_hub.samplers.TopKSampler(k=5, seed=seed)
    with strategy.scope():
        task = build(sampler)
    found["other seeds"] = attempt(task, build(), 0)
    print("\nfound", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
