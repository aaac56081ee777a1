"""One model on many processes: ranges of the sequence, heads of the attentions.

collectives.py  messages between processes, counted
attention.py    causal attention whose keys lie with several processes
sequence.py     SequencePart: a process holds a range of chunks
document.py     DocumentPart: the same of documents that an RPT retrieves from
tensor.py       parallelize: a process holds some of the heads
"""

from .attention import gathered_attention
from .collectives import Line
from .document import DocumentPart
from .sequence import PartBatch, SequencePart
from .tensor import parallelize

__all__ = ["DocumentPart", "Line", "PartBatch", "SequencePart", "gathered_attention", "parallelize"]
