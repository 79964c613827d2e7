"""Jobs whose processes mpirun or srun starts. It may import controller and what stands below it."""
