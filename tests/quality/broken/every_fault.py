"""Every planted fault: importing a file of faults registers what is in it."""

from __future__ import annotations

import bugs_accumulation  # noqa: F401 - registers its faults
import bugs_clipping  # noqa: F401 - registers its faults
import bugs_gradients  # noqa: F401 - registers its faults
import bugs_parameters  # noqa: F401 - registers its faults
import bugs_passes  # noqa: F401 - registers its faults
import bugs_precision  # noqa: F401 - registers its faults
import bugs_recomputation  # noqa: F401 - registers its faults
import bugs_unsharded_state  # noqa: F401 - registers its faults
import faults_access  # noqa: F401 - registers its faults
import faults_around  # noqa: F401 - registers its faults
import faults_claims  # noqa: F401 - registers its faults
import faults_combinations  # noqa: F401 - registers its faults
import faults_compiled  # noqa: F401 - registers its faults
import faults_gradients  # noqa: F401 - registers its faults
import faults_kinds  # noqa: F401 - registers its faults
import faults_memory  # noqa: F401 - registers its faults
import faults_missed  # noqa: F401 - registers its faults
import faults_missed_later  # noqa: F401 - registers its faults
import faults_models  # noqa: F401 - registers its faults
import faults_of_engines  # noqa: F401 - registers its faults
import faults_of_pairs  # noqa: F401 - registers its faults
import faults_optimizers  # noqa: F401 - registers its faults
import faults_options  # noqa: F401 - registers its faults
import faults_parameters  # noqa: F401 - registers its faults
import faults_rare_models  # noqa: F401 - registers its faults
import faults_rolling_back  # noqa: F401 - registers its faults
import faults_saving  # noqa: F401 - registers its faults
import faults_schedules  # noqa: F401 - registers its faults
import faults_state  # noqa: F401 - registers its faults
import faults_streams  # noqa: F401 - registers its faults
import faults_trace  # noqa: F401 - registers its faults
import faults_user_code  # noqa: F401 - registers its faults
import faults_user_state  # noqa: F401 - registers its faults
import toy_engine  # noqa: F401 - registers its faults
from fault import FAULTS

__all__ = ["FAULTS"]
