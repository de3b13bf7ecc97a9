"""The runs: collect, train, export, fidelity, bench; workloads; clusters to run against."""
