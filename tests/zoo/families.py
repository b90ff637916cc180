"""All families by name."""

from tests.zoo import (
    families_batches,
    families_derivatives,
    families_further,
    families_inplace,
    families_machinery,
    families_mixing,
    families_norms,
    families_ragged,
    families_recurrent,
    families_reshapes,
    families_routing,
    families_shared,
    families_weights,
)
from tests.zoo.case import Kind

FAMILIES: dict[str, dict[str, Kind]] = {
    "batches": families_batches.KINDS,
    "derivatives": families_derivatives.KINDS,
    "ragged": families_ragged.KINDS,
    "norms": families_norms.KINDS,
    "weights": families_weights.KINDS,
    "in place": families_inplace.KINDS,
    "shared": families_shared.KINDS,
    "routing": families_routing.KINDS,
    "reshapes": families_reshapes.KINDS,
    "recurrent": families_recurrent.KINDS,
    "machinery": families_machinery.KINDS,
    "mixing": families_mixing.KINDS,
    "further": families_further.KINDS,
}
