"""One model on many processes: sequences divided into ranges, attentions into heads.

collectives.py  communication between processes, with a count of bytes
sequence.py     SequencePart: a process holds a range of chunks; causal attention over keys of several processes
tensor.py       parallelize: a process holds some of the heads
"""

from .collectives import Line
from .sequence import PartBatch, SequencePart, gathered_attention
from .tensor import parallelize

__all__ = ["Line", "PartBatch", "SequencePart", "gathered_attention", "parallelize"]
