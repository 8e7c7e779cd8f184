// MKL takes other kernels on processors of Intel, which cut sums by threads: with these two answers ahead of
// its own (LD_PRELOAD) it takes them on every x86 processor. Of MKL inside LibTorch, as PyPI has it.
extern "C" {
int mkl_serv_intel_cpu() { return 1; }
int mkl_serv_intel_cpu_true() { return 1; }
}
