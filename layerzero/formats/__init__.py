"""Number formats of quantized tensors, as data: codes, scales, packing, conventions of checkpoints."""

from layerzero.formats.elements import ELEMENTS as ELEMENTS
from layerzero.formats.elements import Element as Element
from layerzero.formats.elements import decode_codes as decode_codes
from layerzero.formats.elements import encode_values as encode_values
from layerzero.formats.elements import pack_pairs as pack_pairs
from layerzero.formats.elements import unpack_pairs as unpack_pairs
from layerzero.formats.quantized_tensor import QuantizedTensor as QuantizedTensor
from layerzero.formats.table import FORMATS as FORMATS
from layerzero.formats.table import Format as Format
from layerzero.formats.table import format_of as format_of
