"""One model over several ranks: tensor, sequence, pipeline and expert parallel, over torch.distributed."""

from layerzero.parallel.experts import expert_parallel_moe as expert_parallel_moe
from layerzero.parallel.layout import Layout as Layout
from layerzero.parallel.pipeline import Pipeline as Pipeline
from layerzero.parallel.pipeline import StageStats as StageStats
from layerzero.parallel.tensor import TensorGroup as TensorGroup
from layerzero.parallel.weights import AXES as AXES
from layerzero.parallel.weights import FolderWeights as FolderWeights
from layerzero.parallel.weights import WeightSource as WeightSource
from layerzero.parallel.weights import shard_weights as shard_weights
from layerzero.parallel.weights import stage_weights as stage_weights
