# The same jobs for those who type make; do.sh needs nothing but a shell and Python.
.PHONY: run test gpu-check versions submit-check
run test gpu-check versions submit-check:
	@sh do.sh $@
