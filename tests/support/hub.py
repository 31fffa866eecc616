"""Models of keras-hub with random weights: nothing is downloaded."""

import pytest


def get_hub():
    return pytest.importorskip("keras_hub", reason="./run test -m keras_hub")


def make_backbone(name, *, rank=None, **sizes):
    """Makes a backbone; with a rank, its dense layers have LoRA weights."""
    backbone = getattr(get_hub().models, f"{name}Backbone")(**sizes)
    if rank:
        backbone.enable_lora(rank)
    return backbone


def make_causal_lm(name, **sizes):
    """Makes a language model that reads token ids, without a preprocessor."""
    task = getattr(get_hub().models, f"{name}CausalLM")
    return task(make_backbone(name, **sizes), preprocessor=None)


def make_bert_classifier(**sizes):
    """Makes a classifier of texts with three classes."""
    backbone = make_backbone("Bert", dropout=0.0, **sizes)
    task = get_hub().models.BertTextClassifier
    return task(backbone, num_classes=3, dropout=0.0)
