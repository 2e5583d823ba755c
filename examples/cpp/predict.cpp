// What an exported .onnx says of a photo. Needs ONNX Runtime 1.20 or newer and nlohmann/json.
//
//   g++ -std=c++17 -O2 predict.cpp -I ONNXRUNTIME/include -L ONNXRUNTIME/lib -lonnxruntime -o predict
//   ./predict client-0.onnx cat.ppm
//
// A PPM (P6) is a photo without compression, so that the example needs no decoder: `convert cat.jpg
// -auto-orient cat.ppm`. Decode whole images yourself, turned upright as their EXIF orientation says.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <onnxruntime_cxx_api.h>

#include "pixels.h"

namespace {

fedmpq::Image read_ppm(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  int width = 0, height = 0, most = 0;
  file >> kind >> width >> height >> most;
  file.get();
  if (!file || kind != "P6" || most != 255 || width < 1 || height < 1)
    throw std::runtime_error(std::string(path) + " is no binary PPM of 8 bits a channel");
  fedmpq::Image image(height, width, 3);
  file.read(reinterpret_cast<char*>(image.bytes.data()), static_cast<std::streamsize>(image.bytes.size()));
  if (!file) throw std::runtime_error(std::string(path) + " ends early");
  return image;
}

std::vector<float> probabilities(const float* logits, size_t count) {
  const float most = *std::max_element(logits, logits + count);
  std::vector<float> shares(count);
  std::transform(logits, logits + count, shares.begin(), [&](float x) { return std::exp(x - most); });
  const float sum = std::accumulate(shares.begin(), shares.end(), 0.0f);
  for (float& share : shares) share /= sum;
  return shares;
}

void predict(const char* model, const char* photo) {
  Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "predict");
  Ort::Session session(environment, model, Ort::SessionOptions());

  // The description in the file: "classes", "task", and "input" with the scale and zero point of a pixel.
  Ort::AllocatorWithDefaultOptions allocator;
  const auto told = session.GetModelMetadata().LookupCustomMetadataMapAllocated("fedmpq", allocator);
  if (!told) throw std::runtime_error(std::string(model) + " is no model of fedmpq");
  const auto classes = nlohmann::json::parse(told.get()).at("classes").get<std::vector<std::string>>();

  // Pixels go in as they are, uint8 (batch, height, width, channels): normalisation is inside the file.
  std::vector<int64_t> shape = session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
  shape[0] = 1;
  const fedmpq::Image colours = read_ppm(photo);
  fedmpq::Image pixels = fedmpq::resized(shape[3] == 1 ? fedmpq::grey(colours) : colours,
                                         static_cast<int>(shape[1]), static_cast<int>(shape[2]));
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto input = Ort::Value::CreateTensor<uint8_t>(memory, pixels.bytes.data(), pixels.bytes.size(),
                                                       shape.data(), shape.size());

  const char* names[] = {"image"};
  const char* results[] = {"logits"};
  const auto outputs = session.Run(Ort::RunOptions(), names, &input, 1, results, 1);
  const std::vector<float> shares = probabilities(outputs[0].GetTensorData<float>(), classes.size());
  const size_t best = std::max_element(shares.begin(), shares.end()) - shares.begin();
  std::printf("%s %.6f\n", classes[best].c_str(), shares[best]);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: predict MODEL.onnx PHOTO.ppm\n";
    return 2;
  }
  try {
    predict(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
