import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import com.google.gson.JsonArray;
import com.google.gson.JsonParser;
import java.awt.image.BufferedImage;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Map;
import javax.imageio.ImageIO;

/**
 * What an exported .onnx says of a photo. Needs com.microsoft.onnxruntime:onnxruntime and com.google.code.gson:gson.
 *
 * <pre>java -cp onnxruntime.jar:gson.jar:. Predict client-0.onnx cat.jpg</pre>
 *
 * <p>ImageIO does not turn photos upright as their EXIF orientation says: turn them yourself, as training does.
 */
public final class Predict {
  private Predict() {}

  public static void main(String[] arguments) throws OrtException, IOException {
    if (arguments.length != 2) {
      System.err.println("usage: Predict MODEL.onnx PHOTO");
      System.exit(2);
    }
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    try (OrtSession session = environment.createSession(arguments[0])) {
      // The description in the file: "classes", "task", and "input" with the scale and zero point of a pixel.
      String told = session.getMetadata().getCustomMetadata().get("fedmpq");
      JsonArray classes = JsonParser.parseString(told).getAsJsonObject().getAsJsonArray("classes");

      // Pixels go in as they are, uint8 (batch, height, width, channels): normalisation is inside the file.
      long[] shape = ((TensorInfo) session.getInputInfo().get("image").getInfo()).getShape();
      shape[0] = 1;
      Pixels pixels = read(arguments[1], (int) shape[3]).resized((int) shape[1], (int) shape[2]);
      ByteBuffer bytes = ByteBuffer.wrap(pixels.bytes);
      try (OnnxTensor image = OnnxTensor.createTensor(environment, bytes, shape, OnnxJavaType.UINT8);
          OrtSession.Result result = session.run(Map.of("image", image))) {
        float[] logits = ((float[][]) result.get("logits").orElseThrow().getValue())[0];
        int best = best(logits);
        System.out.printf("%s %.6f%n", classes.get(best).getAsString(), probability(logits, best));
      }
    }
  }

  private static Pixels read(String path, int channels) throws IOException {
    BufferedImage photo = ImageIO.read(new File(path));
    if (photo == null) {
      throw new IOException(path + " is no image that ImageIO can read");
    }
    int height = photo.getHeight();
    int width = photo.getWidth();
    return Pixels.ofColours(height, width, channels, photo.getRGB(0, 0, width, height, null, 0, width));
  }

  private static int best(float[] logits) {
    int best = 0;
    for (int i = 1; i < logits.length; i++) {
      best = logits[i] > logits[best] ? i : best;
    }
    return best;
  }

  private static double probability(float[] logits, int index) {
    double sum = 0;
    for (float logit : logits) {
      sum += Math.exp(logit - logits[index]);
    }
    return 1 / sum;
  }
}
