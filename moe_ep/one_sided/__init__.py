"""What do the backends on the one-sided transport share? All but which way a step goes on CUDA."""
