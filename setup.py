"""Builds torch_gpumode._C with the torch that is installed: `pip install --no-build-isolation .`

What is built depends on that torch and on this machine; nothing is downloaded:

    CPU-only torch            everything that needs no CUDA
    CUDA torch without nvcc   everything but the .cu files
    CUDA torch and nvcc       everything

TORCH_GPUMODE_CUDA=0|1 overrides; MAX_JOBS and TORCH_CUDA_ARCH_LIST mean what they do in torch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # a broken install of ours must not stop this
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    how = "install torch 2.11 to 2.14, then run: pip install --no-build-isolation ."
    raise SystemExit(f"torch_gpumode builds against your torch, and {error}: {how}") from error

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build starts without it
from torch_gpumode import config  # noqa: E402  (imports no torch)

DEFAULT_ARCH_LIST = "8.0;9.0;10.0;12.0+PTX"  # where no GPU tells: Ampere, Hopper, Blackwell


def find_cuda_home() -> Path | None:
    """Returns the toolkit. nvcc on PATH may be a wrapper elsewhere: its headers must be there."""
    on_path = shutil.which("nvcc")
    guesses = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    guesses.append(on_path and str(Path(on_path).resolve().parent.parent))
    usual = [f"/usr/local/cuda-{torch.version.cuda}", "/usr/local/cuda"]
    for home in map(Path, [*filter(None, guesses), *usual]):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def nvcc_version(home: Path) -> str:
    told = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", told.stdout)
    return found[1] if found else "unknown"


def decide_cuda(wanted: bool | None) -> tuple[Path | None, str | None]:
    """Returns the toolkit to compile .cu files with, or None and the reason why not."""
    if wanted is False:
        return None, "TORCH_GPUMODE_CUDA=0 was set when it was built"
    home = find_cuda_home() if torch.version.cuda else None
    if not torch.version.cuda:
        why = f"torch {torch.__version__} is built without CUDA"
    elif home is None:
        why = "no CUDA toolkit with nvcc was found (PATH, CUDA_HOME, /usr/local/cuda)"
    elif nvcc_version(home).split(".")[0] != torch.version.cuda.split(".")[0]:
        why = f"nvcc is {nvcc_version(home)}, torch is built for CUDA {torch.version.cuda}"
    else:
        return home, None
    if wanted:
        raise SystemExit(f"TORCH_GPUMODE_CUDA=1, but {why}")
    return None, why


def wheel_includes() -> list[str]:
    """Returns the headers in torch's own dependencies, for what the toolkit lacks."""
    site = Path(torch.__file__).resolve().parent.parent / "nvidia"
    return [str(path) for path in [*site.glob("cu1?/include"), *site.glob("nccl/include")]]


def default_arch_list() -> str:
    capability = torch.cuda.get_device_capability
    visible = {"{}.{}".format(*capability(i)) for i in range(torch.cuda.device_count())}
    return ";".join(sorted(visible)) or DEFAULT_ARCH_LIST


CUDA_HOME, WHY_NOT_CUDA = decide_cuda(config.load().cuda)


def extension() -> Extension:
    sources = [*ROOT.glob("csrc/**/*.cpp")] + ([*ROOT.glob("csrc/**/*.cu")] if CUDA_HOME else [])
    ext = cpp_extension.CppExtension(
        "torch_gpumode._C",
        sorted(str(path.relative_to(ROOT)) for path in sources),
        include_dirs=[str(ROOT / "csrc")],
        # Without ninja, all that tells distutils that a header has changed.
        depends=[str(path) for path in sorted(ROOT.glob("csrc/**/*.*h"))],
    )
    # Every operation rounds by itself, on CPU and CUDA alike; square roots become vectors.
    common = ["-Wall", "-Wextra", "-Wno-psabi", "-fvisibility=hidden", "-ffp-contract=off"]
    # Also named by -I, which this overrides, so that torch's own headers do not warn.
    torch_headers = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    ext.extra_compile_args = {
        "cxx": ["-O3", "-g0", "-fopenmp", "-fno-math-errno", *common, *torch_headers],
        "nvcc": ["-O3", "-fmad=false", "-Xcompiler", ",".join(common)],
    }
    ext.extra_link_args = ["-fopenmp"]
    if CUDA_HOME:
        ext.define_macros.append(("GPUMODE_WITH_CUDA", "1"))
        ext.include_dirs += [str(CUDA_HOME / "include"), *wheel_includes()]
        ext.library_dirs.append(str(CUDA_HOME / "lib64"))
        ext.libraries += ["cudart", "c10_cuda"]
    return ext


class Build(cpp_extension.BuildExtension):
    """Keeps its objects between builds, and writes down next to the extension what was built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # An editable install would use a new temporary folder each time, and rebuild everything.
        flavour = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
        self.build_temp = str(ROOT / "build" / f"{flavour}-{'cuda' if CUDA_HOME else 'cpu'}")

    def run(self) -> None:
        if CUDA_HOME:
            cpp_extension.CUDA_HOME = str(CUDA_HOME)
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_arch_list())
        super().run()
        gxx = subprocess.run([cpp_extension.get_cxx_compiler(), "--version"], capture_output=True)
        info = {
            "torch": torch.__version__,
            "compiler": gxx.stdout.decode().partition("\n")[0],
            "cuda": nvcc_version(CUDA_HOME) if CUDA_HOME else None,
            "why_not_cuda": WHY_NOT_CUDA,
            "architectures": os.environ.get("TORCH_CUDA_ARCH_LIST") if CUDA_HOME else None,
        }
        extension_path = Path(self.get_ext_fullpath("torch_gpumode._C"))
        extension_path.with_suffix(".json").write_text(json.dumps(info, indent=1) + "\n")


setup(
    packages=[
        *find_packages(include=["torch_gpumode", "torch_gpumode.*"]),
        *("torch_gpumode." + name for name in find_packages(include=["triton_kernels*"])),
    ],
    # Triton has a package triton_kernels of its own.
    package_dir={"torch_gpumode.triton_kernels": "triton_kernels"},
    package_data={"torch_gpumode": ["py.typed"]},
    # The virtual tables that we derive from change with each minor version.
    install_requires=[f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"],
    ext_modules=[extension()],
    cmdclass={"build_ext": Build},
)
