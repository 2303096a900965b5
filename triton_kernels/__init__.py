"""Device verbs and fused kernels in Triton, installed as `torch_gpumode.triton_kernels`."""

if __name__ == "triton_kernels":
    raise ImportError(
        "this is the source folder of torch_gpumode.triton_kernels, found because the current "
        "directory is torch_gpumode's repository, and not Triton's package triton_kernels. "
        "Import torch_gpumode.triton_kernels, or start Python in another directory."
    )
