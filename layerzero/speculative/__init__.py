"""Speculative decoding: a draft and a target, here, on another device, or across ranks."""

from layerzero.speculative.generation import Decoder as Decoder
from layerzero.speculative.generation import DraftBatch as DraftBatch
from layerzero.speculative.generation import Drafter as Drafter
from layerzero.speculative.generation import Generation as Generation
from layerzero.speculative.generation import SamplingParams as SamplingParams
from layerzero.speculative.generation import SequenceState as SequenceState
from layerzero.speculative.generation import SpeculationStats as SpeculationStats
from layerzero.speculative.generation import Verifier as Verifier
from layerzero.speculative.generation import generate as generate
from layerzero.speculative.generation import propose_draft as propose_draft
