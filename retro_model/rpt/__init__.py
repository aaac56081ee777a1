"""RPT, the Retrieval-Pretrained Transformer (arXiv 2306.13421), on `retro_kernels`: a decoder that retrieves from its
own past.

config.py       RPTConfig: sizes, switches, the paper's models
inputs.py       checks of tokens and neighbours
layers.py       window attention, chunked cross-attention, the decoder layer
retriever.py    SelfRetriever: chunk encoder, W_Q, W_K, search
memory.py       SelfMemory: retriever, NeighbourEncoder and NeighbourGate
model.py        RPT; retro_model/retrofit/rpt.py adds a memory to a trained decoder
loss.py         lambda_rank
supervision.py  BM25 candidates and the reference language model's scores of them, on disk
index.py        SelfIndex, which grows with a document; cache.py RPTCache; decoding.py decoding with it

Training is in retro_model/training/rpt.py, evaluation in retro_model/evaluation/rpt.py, demonstrations in
examples/rpt_cards.py.
"""

from .cache import RPTCache
from .config import OWN, RPTConfig
from .index import SelfIndex
from .layers import Retrieved
from .loss import lambda_rank
from .memory import NeighbourEncoder, NeighbourGate
from .model import RPT
from .retriever import SelfRetriever

__all__ = ["OWN", "RPT", "NeighbourEncoder", "NeighbourGate", "RPTCache", "RPTConfig", "Retrieved"]
__all__ += ["SelfIndex", "SelfRetriever", "lambda_rank"]
