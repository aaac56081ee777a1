"""Time estimates and static metrics of launches on GPUs that are not here."""

from ..machines import MACHINES, Machine
from .machine_code import static_record
from .model import Estimate, estimate

__all__ = ["MACHINES", "Estimate", "Machine", "estimate", "static_record"]
