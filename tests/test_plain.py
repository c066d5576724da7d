"""The yardstick computes what our model computes, so that their times compare."""

import pytest
import torch
from benchmarks import plain

from hyla.configs import replace_fields  # noqa
