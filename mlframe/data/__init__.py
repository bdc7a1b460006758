"""The data of mlframe: Lightning data modules, their sources, and a loader that resumes exactly."""
