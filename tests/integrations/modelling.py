"""transformers' own common modelling tests for Llama and BERT, each model patched as soon as it is made.

Run by `python -m scripts.modelling_tests`, which puts the tests of transformers' source distribution beside
this file as the package `transformers_tests`. The distribution lacks the files of single models, so their
testers are written here.
"""

from __future__ import annotations

import functools
import os
import unittest
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
import transformers
from transformers_tests.test_modeling_common import ModelTesterMixin  # type: ignore[import-not-found]

import layerzero as lz

IS_PATCHED = os.environ.get("LAYERZERO_MODELLING") == "patched"


class Tester:
    """What the common tests ask of a model's tester: sizes, a configuration, and a batch for it."""

    batch_size, seq_length, hidden_size = 3, 7, 32
    num_hidden_layers, num_attention_heads, num_choices = 2, 4, 4
    is_training = True

    def __init__(self, config_class: Any, **more: Any) -> None:
        self.config_class, self.more = config_class, more

    def get_config(self) -> Any:
        """A small configuration of the family."""
        return self.config_class(
            vocab_size=99, hidden_size=self.hidden_size, intermediate_size=37, pad_token_id=0,
            num_hidden_layers=self.num_hidden_layers, num_attention_heads=self.num_attention_heads,
            max_position_embeddings=512, **self.more,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The configuration and a batch without padding."""
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _patching(kind: Any) -> Callable[..., None]:
    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if type(self) is kind:
            lz.patch(self)

    return __init__


class _Common:
    """One family under the common tests."""

    all_model_classes: tuple[Any, ...]
    tester: ClassVar[Callable[[], Tester]]

    def setUp(self) -> None:
        """A tester, and models that are patched where that is asked for."""
        make: Any = vars(type(self))["tester"]
        self.model_tester = make()
        for kind in self.all_model_classes if IS_PATCHED else ():
            swap = mock.patch.object(kind, "__init__", _patching(kind))
            swap.start()
            self.addCleanup(swap.stop)  # type: ignore[attr-defined]


class LlamaModelTest(_Common, ModelTesterMixin, unittest.TestCase):  # type: ignore[misc]
    """Llama's models."""

    all_model_classes = (
        transformers.LlamaModel, transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification,
        transformers.LlamaForQuestionAnswering, transformers.LlamaForTokenClassification,
    )  # fmt: skip
    tester = functools.partial(Tester, transformers.LlamaConfig, num_key_value_heads=2)


class BertModelTest(_Common, ModelTesterMixin, unittest.TestCase):  # type: ignore[misc]
    """BERT's models."""

    all_model_classes = (
        transformers.BertModel, transformers.BertForMaskedLM, transformers.BertForQuestionAnswering,
        transformers.BertForSequenceClassification, transformers.BertForTokenClassification,
    )  # fmt: skip
    tester = functools.partial(Tester, transformers.BertConfig)
