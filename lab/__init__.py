"""Research: data sets, Dirichlet partitions, baselines, simulation, the paper's tables."""
