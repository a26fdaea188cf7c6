"""Where keys and values of growing sequences are stored: in pages, in one block each, or in chunks.

`PagedCache` hands its pool and block tables to `paged_attention`; `ContiguousCache` and `ChunkedCache` give
dense tensors. All three are a `Cache`. One event loop or thread owns a cache; it has no lock.
`PrefixCache` finds pages by the tokens that they hold; `PagedRequests` lets requests share a pool;
`PrefixRouter` sends requests to the replica that has most of their prompt and the least to do.
"""

from layerzero.kvcache.attention_metadata import AttentionMetadata as AttentionMetadata
from layerzero.kvcache.block_allocator import ForeignPageError as ForeignPageError
from layerzero.kvcache.block_allocator import FreedPageError as FreedPageError
from layerzero.kvcache.block_allocator import PageAllocator as PageAllocator
from layerzero.kvcache.block_allocator import PagesExhaustedError as PagesExhaustedError
from layerzero.kvcache.block_tables import PagedSequence as PagedSequence
from layerzero.kvcache.block_tables import TokenRange as TokenRange
from layerzero.kvcache.convert import Conversion as Conversion
from layerzero.kvcache.convert import conversion as conversion
from layerzero.kvcache.convert import convert as convert
from layerzero.kvcache.dense import ChunkedCache as ChunkedCache
from layerzero.kvcache.dense import ContiguousCache as ContiguousCache
from layerzero.kvcache.paged_cache import PagedCache as PagedCache
from layerzero.kvcache.prefixes import PageKeys as PageKeys
from layerzero.kvcache.prefixes import PrefixCache as PrefixCache
from layerzero.kvcache.protocol import FreedSequenceError as FreedSequenceError
from layerzero.kvcache.protocol import KVCache as KVCache
from layerzero.kvcache.protocol import KVCacheSpec as KVCacheSpec
from layerzero.kvcache.protocol import UnknownSequenceError as UnknownSequenceError
from layerzero.kvcache.requests import PagedRequest as PagedRequest
from layerzero.kvcache.requests import PagedRequests as PagedRequests
from layerzero.kvcache.routing import PrefixRouter as PrefixRouter
from layerzero.kvcache.routing import RoutedRequest as RoutedRequest
