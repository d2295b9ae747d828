"""Extensions of Lightning's DDP: options, reducers that follow `requires_grad`, rejection of unreduced gradients."""
