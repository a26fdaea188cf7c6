"""Which errors mean that the process has lost its accelerator for good: it must end and begin anew.

After such an error every later call of the CUDA context fails with the same error; nothing inside the
process mends it. Source: NVIDIA, CUDA runtime API, cudaError_t ("the process must be terminated and
relaunched"), and the texts that torch puts into its exceptions.
"""

from __future__ import annotations

_STICKY = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "device-side assert triggered",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ecc error encountered",
    "hardware stack error",
    "invalid program counter",
    "the launch timed out and was terminated",
    "device has fallen off the bus",
    "nvlink error detected",
    "contained or uncontained memory error",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_unknown",
    "cuda error: unknown error",
)


def text_of(error: BaseException) -> str:
    """What an error says, or its class where a kernel's own class of errors cannot say it."""
    try:
        return str(error)
    except Exception:
        return type(error).__name__


def lost_device(error: BaseException | None) -> str | None:
    """The sentence of a fault that ends the process, found in an error or in its causes; None otherwise."""
    seen = 0
    while error is not None and seen < 8:
        text = text_of(error).lower()
        if "cuda" in text or "accelerator" in type(error).__name__.lower():
            for sentence in _STICKY:
                if sentence in text:
                    return sentence
        error = error.__cause__ or error.__context__
        seen += 1
    return None
