"""The package nc_run, and folders that it runs."""

import pytest
from suites.runner_models import quantized
from suites.runner_package import assembled, use

import nc


@pytest.fixture(scope="session")
def package(tmp_path_factory):
    """The folder with nc_run."""
    folder = assembled(tmp_path_factory.mktemp("nc_run"))
    use(folder)
    return folder


@pytest.fixture(scope="session")
def nc_run(package):
    import nc_run

    assert nc_run.__file__.startswith(str(package))
    return nc_run


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """Models with their folders, each made once: (name, kind) → fp32, quantized, example, folder."""
    made = {}

    def export(name, kind):
        if (name, kind) not in made:
            folder = tmp_path_factory.mktemp("exported") / name
            model, q_model, example = quantized(name, kind)
            nc.export_runner(q_model, folder)
            made[name, kind] = model, q_model, example, folder
        return made[name, kind]

    return export
