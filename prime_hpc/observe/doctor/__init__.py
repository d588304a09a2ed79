"""The doctor: why a run is dead or stuck, from the files that it left."""

from prime_hpc.observe.doctor.diagnosis import Diagnosis, diagnose
from prime_hpc.observe.doctor.evidence import Evidence

__all__ = ["Diagnosis", "Evidence", "diagnose"]
