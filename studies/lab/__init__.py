"""Statistics of studies: predictions, intervals over seeds and problems, tables and pictures."""
