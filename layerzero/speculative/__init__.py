"""Speculative decoding: a draft and a target, here, on another device, or across ranks."""

from layerzero.speculative.generation import Decoder as Decoder
from layerzero.speculative.generation import Drafter as Drafter
from layerzero.speculative.generation import Drawing as Drawing
from layerzero.speculative.generation import Generation as Generation
from layerzero.speculative.generation import Held as Held
from layerzero.speculative.generation import Round as Round
from layerzero.speculative.generation import Speculation as Speculation
from layerzero.speculative.generation import Verifier as Verifier
from layerzero.speculative.generation import drafted_by as drafted_by
from layerzero.speculative.generation import generate as generate
