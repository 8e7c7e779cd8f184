// For the sampler: a token has the same logits alone and in any batch.
#pragma once

namespace isograd {

// While one lives, products of this thread by brgemm in fp32 choose their kernel without regard to the number
// of rows, so that a row's bits do not depend on the other rows. Costs some microseconds for small products.
class RowInvariantProducts {
 public:
  RowInvariantProducts();
  ~RowInvariantProducts();
  RowInvariantProducts(const RowInvariantProducts&) = delete;
  RowInvariantProducts& operator=(const RowInvariantProducts&) = delete;

 private:
  bool before_;
};

}  // namespace isograd
