"""Run models that `nc.export_runner` wrote, with numpy alone."""

from nc_run import errors as errors
from nc_run.model import Model as Model
from nc_run.model import load as load
