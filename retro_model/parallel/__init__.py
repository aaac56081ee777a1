"""One model on many processes: sequences divided into ranges, attentions into heads.

collectives.py  communication between processes, with a count of bytes
sequence.py     SequencePart: a process holds a range of chunks; causal attention over keys of several processes
document.py     DocumentPart: the same for an RPT's documents
tensor.py       parallelize: a process holds some of the heads
"""

from .collectives import Line
from .document import DocumentPart
from .sequence import PartBatch, SequencePart, gathered_attention
from .tensor import parallelize

__all__ = ["DocumentPart", "Line", "PartBatch", "SequencePart", "gathered_attention", "parallelize"]
